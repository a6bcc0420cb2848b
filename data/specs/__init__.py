"""What the bundled databases hold, as data: one module per walk of life."""

from specs.clinic import CLINIC
from specs.football import FOOTBALL
from specs.harbour import HARBOUR
from specs.library import LIBRARY

# In the order in which conventions are dealt out: add new ones at the end.
ALL_DATABASES = (CLINIC, LIBRARY, FOOTBALL, HARBOUR)
