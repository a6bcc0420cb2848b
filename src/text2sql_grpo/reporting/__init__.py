"""Views of a run folder: tables, page, picture, trackers, findings."""
