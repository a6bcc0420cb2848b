"""A repair shop for cars."""

from specs.kit import Database, day, flag, person, plain, real, ref, said, table, whole
from specs.people import full_name

GARAGE = Database(
    "garage",
    "train",
    "A repair shop: customers, cars, mechanics, repairs and spare parts",
    (
        table(
            "customer",
            "customer",
            60,
            full_name("name", "name"),
            said(
                "suburb",
                "suburb",
                "Ashgrove, Brookside, Beaufort, Cranley, Clifton, Fairview, Glenmore, Holloway,"
                " Lakeside, Oakdale, Parkville, Westbrook",
            ),
            flag(
                "company",
                "company flag",
                "Y, N",
                yes="registered as a company",
                no="not registered as a company",
                yes_too="with a company account",
                no_too="without a company account",
            ),
            day("since", "date of first visit", "2009-01-01", "2022-12-31"),
        ),
        table(
            "car",
            "car",
            84,
            ref("customer", 60),
            said(
                "make",
                "make",
                "Audi, Citroen, Chevrolet, Fiat, Ford, Honda, Kia, Mazda, Mercedes, Opel, Toyota, Volvo",
            ),
            said(
                "paint",
                "colour",
                "azure, bronze brown, copper red, graphite, green, jade, lemon, magenta, navy, pearl, white",
            ),
            whole("year", "year of construction", 1999, 2023),
            whole("mileage", "mileage", 4000, 240000, step=2000, null=0.07),
        ),
        table(
            "mechanic",
            "mechanic",
            32,
            full_name("name", "name"),
            said(
                "skill",
                "skill",
                "bodywork, brakes, diesel, electrics, engines, gearbox, hybrid, suspension, tuning, welding",
            ),
            plain("contract", "contract", "full time, part time, apprentice"),
            said("review", "review quarter", "first quarter, second quarter, third quarter, fourth quarter"),
            whole("pay", "monthly pay", 1800, 4200, step=150),
        ),
        table(
            "repair",
            "repair",
            220,
            ref("car", 84),
            ref("mechanic", 32),
            said(
                "fault",
                "fault",
                "flat tyre, fuel leak, cracked screen, clutch slip, dead battery, noisy exhaust,"
                " oil leak, rust, worn belt",
            ),
            day("day", "date", "2022-01-01", "2023-12-31"),
            real("hours", "number of hours", 1, 16),
        ),
        table(
            "spare part",
            "spare part",
            120,
            ref("repair", 220),
            said(
                "vendor",
                "vendor",
                "Autoline, Axle King, Bearing House, Carmax, Drivetech, Gearworks, Motion Depot,"
                " Motorama, Pistonia, Wheelhouse",
            ),
            person(
                "signed",
                "storekeeper",
                "Arne Bakker, Britta Blum, Cora Deacon, Doug Fisher, Enid Fowler, Floyd Griggs,"
                " Hattie Lund, Jens Madsen",
            ),
            real("cost", "cost", 5, 900, cents=500),
        ),
    ),
)
