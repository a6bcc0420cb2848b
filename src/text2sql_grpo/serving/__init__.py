"""A trained agent behind a session, a server and a page; the page for reviews."""
