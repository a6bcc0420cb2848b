"""The stages of a run, in their order, and the folder that they leave."""
