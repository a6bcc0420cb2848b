"""A zoo."""

from specs.kit import Database, day, flag, person, plain, real, ref, said, table, whole
from specs.people import full_name

ZOO = Database(
    "zoo",
    "test",
    "A zoo: keepers, enclosures, animals, their meals and checkups",
    (
        table(
            "keeper",
            "keeper",
            34,
            full_name("name", "name"),
            said(
                "pavilion",
                "pavilion",
                "Amazon, Arctic House, Borneo, Congo, Everglades, Gobi, Galapagos, Kalahari, Nile,"
                " Outback, Serengeti",
            ),
            said("shift", "shift length", "6 hours, 8 hours, 10 hours, 12 hours"),
            whole("salary", "salary", 1900, 3800, step=100),
        ),
        table(
            "enclosure",
            "enclosure",
            32,
            said(
                "habitat",
                "habitat",
                "cave, desert, grassland, glacier, jungle, lagoon, mangrove, prairie, reef, swamp",
            ),
            flag(
                "indoor",
                "indoor flag",
                "1, 0",
                yes="located indoors",
                no="located outdoors",
                yes_too="under a roof",
                no_too="in the open air",
            ),
            whole("size", "size in square metres", 40, 2400, step=20),
            whole("built", "year of building", 1955, 2022, null=0.1),
        ),
        table(
            "animal",
            "animal",
            96,
            ref("enclosure", 32),
            ref("keeper", 34),
            said(
                "species",
                "species",
                "anaconda, bison, baboon, cheetah, flamingo, gorilla, iguana, leopard, lemur,"
                " ocelot, penguin, tapir",
            ),
            real("weight", "weight", 1, 400),
            day("born", "date of birth", "1998-01-01", "2023-03-31", null=0.08),
        ),
        table(
            "meal",
            "meal",
            260,
            ref("animal", 96),
            said(
                "food",
                "food",
                "apples, clams, crickets, eggs, hay, honey, lettuce, mealworms, nuts, shrimp, squid",
            ),
            plain("time", "feeding time", "morning, noon, evening", null=0.07),
            whole("grams", "weight in grams", 50, 4000, step=50),
            day("served", "date", "2023-01-01", "2023-12-31"),
        ),
        table(
            "checkup",
            "checkup",
            110,
            ref("animal", 96),
            person(
                "vet",
                "vet",
                "Amos Lindgren, Beatrix Lang, Conrad Maddox, Doris Pell, Edgar Platt, Faye Rushton,"
                " Gregor Sykes, Hedda Stein, Ingrid Zorn",
            ),
            said(
                "finding",
                "finding",
                "allergy, broken tooth, cough, dehydration, eye infection, healthy, limp,"
                " parasites, pregnant",
            ),
            real("cost", "cost", 20, 600, cents=500),
        ),
    ),
)
