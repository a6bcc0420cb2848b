"""The same environment in other people's programs; each module needs a package of its own to be there."""
