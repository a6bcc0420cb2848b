"""A town clinic."""

from specs.kit import Database, day, flag, paired, person, plain, real, ref, said, table, whole
from specs.people import full_name

CLINIC = Database(
    "clinic",
    "train",
    "A town clinic: nurses, patients, their visits and the drugs they were given",
    (
        table(
            "nurse",
            "nurse",
            36,
            full_name("name", "name"),
            said("ward", "ward", "Lisbon, Leiden, Porto, Madrid, Malaga, Oslo, Turin, Vienna, Bergen, Basel"),
            plain("shift", "shift", "day, night, evening"),
            day("hired", "hiring date", "2008-01-01", "2023-12-31"),
        ),
        table(
            "patient",
            "patient",
            90,
            full_name("name", "name"),
            day("born", "date of birth", "1935-01-01", "2018-12-31"),
            flag(
                "smoker",
                "smoker flag",
                "Y, N",
                yes="marked as smokers",
                no="not marked as smokers",
                yes_too="known to smoke",
                no_too="known not to smoke",
            ),
            said(
                "town",
                "town",
                "Ashford, Arundel, Whitby, Dunmore, Denbigh, Selkirk, Kendal, Penrith, Poole, Corby, Ripley",
            ),
            said(
                "insurer",
                "insurer",
                "Medicare Plus, Guardian Life, Galaxy Health, Nordica Mutual, Helix Cover, Blue Anchor,"
                " Bright Shield, Premier Aid",
            ),
        ),
        table(
            "drug",
            "drug",
            40,
            paired(
                "name",
                "name",
                "Alo, Beta, Cori, Dexa, Keto, Lora, Zinc",
                "zol, mycin, pine, statin, D'or, 40",
            ),
            said(
                "maker",
                "maker",
                "Hoffman Labs, Harrow Chemicals, Tessaro, Trident Pharma, Umbrella Works, Zenith, Ravello,"
                " Rowan Biotech, Jasper Care",
            ),
            real("price", "price", 2, 90),
            flag(
                "rx",
                "prescription flag",
                "1, 0",
                yes="sold on prescription only",
                no="sold without a prescription",
                yes_too="for which a prescription is needed",
                no_too="for which no prescription is needed",
            ),
        ),
        table(
            "visit",
            "visit",
            280,
            ref("patient", 90),
            ref("nurse", 36),
            person(
                "doctor",
                "doctor",
                "Jon Smith, Alice Sorensen, Marta Keller, Peter Kovacs, Nadia Ferro, Omar Aziz,"
                " Ruth Abbott,"
                " Ian Dempsey, Carla Ruiz, Lena Vogt",
            ),
            day("day", "date", "2022-01-01", "2023-12-31"),
            real("fee", "fee", 20, 240, cents=250, null=0.06),
        ),
        table(
            "dose",
            "dose",
            150,
            ref("visit", 280),
            ref("drug", 40),
            whole("amount", "amount", 1, 12),
            said("form", "form", "tablet, tincture, syrup, spray, capsule, cream, ointment, injection"),
        ),
    ),
)
