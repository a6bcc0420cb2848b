"""What the bundled databases hold, as data: one module per walk of life."""

from specs.airline import AIRLINE
from specs.bakery import BAKERY
from specs.bank import BANK
from specs.clinic import CLINIC
from specs.farm import FARM
from specs.football import FOOTBALL
from specs.garage import GARAGE
from specs.harbour import HARBOUR
from specs.hotel import HOTEL
from specs.library import LIBRARY
from specs.museum import MUSEUM
from specs.newspaper import NEWSPAPER
from specs.resort import RESORT
from specs.school import SCHOOL
from specs.telescope import TELESCOPE
from specs.theatre import THEATRE
from specs.vineyard import VINEYARD
from specs.zoo import ZOO

# Training databases, then those of development, then of tests.
ALL_DATABASES = (
    *(
        CLINIC,
        LIBRARY,
        FOOTBALL,
        HARBOUR,
        SCHOOL,
        BAKERY,
        AIRLINE,
        VINEYARD,
        THEATRE,
        GARAGE,
        FARM,
        NEWSPAPER,
    ),
    *(HOTEL, MUSEUM),
    *(TELESCOPE, ZOO, RESORT, BANK),
)
