"""A museum."""

from specs.kit import Database, day, flag, later, paired, person, real, ref, said, table, whole
from specs.people import full_name

MUSEUM = Database(
    "museum",
    "dev",
    "A museum: exhibits, restorations, guides, visiting groups and their tours",
    (
        table(
            "exhibit",
            "exhibit",
            90,
            paired(
                "name",
                "name",
                "Bronze, Stone, Painted, Queen's, Broken, Gilded, Clay, Dürer's",
                "Mask, Vase, Horse, Idol, Dagger, Tablet, Comb, Lamp, Shield, Bowl, Crown, Éventail",
            ),
            said(
                "culture",
                "culture",
                "Aztec, Assyrian, Byzantine, Celtic, Etruscan, Hittite, Inca, Minoan, Mayan,"
                " Persian, Roman, Viking",
            ),
            said(
                "donor",
                "donor",
                "Ashmole Trust, Bexley Fund, Carnegie, Getty, Guild House, Hearst, Lyceum,"
                " Rothschild, Ransome, Whitney",
            ),
            whole("found", "year of discovery", 1790, 1999, null=0.12),
            real("value", "value", 500, 90000, cents=50000),
        ),
        table(
            "restoration",
            "restoration",
            64,
            ref("exhibit", 90),
            person(
                "restorer",
                "restorer",
                "Aurel Stan, Bianca Sforza, Claude Tissot, Dmitri Ulanov, Estelle Vidal,"
                " Fritz Wagner, Gloria Weiss, Hiro Yamada",
            ),
            real("cost", "cost", 100, 6000, cents=2500),
            day("begun", "start date", "2018-01-01", "2023-06-30"),
            later("finished", "end date", "begun", 5, 200, null=0.15),
        ),
        table(
            "guide",
            "guide",
            34,
            full_name("name", "name"),
            said(
                "language",
                "language",
                "Arabic, Basque, Catalan, Czech, Dutch, Hindi, Hungarian, Italian, Korean, Swahili, Urdu",
            ),
            flag(
                "freelance",
                "freelance flag",
                "Y, N",
                yes="working freelance",
                no="not working freelance",
                yes_too="hired as freelancers",
                no_too="not hired as freelancers",
            ),
            whole("fee", "fee", 40, 160, step=10),
        ),
        table(
            "group",
            "group",
            60,
            said(
                "school",
                "school",
                "Bellevue, Brompton, Copeland, Eton, Fairmont, Gresham, Harrow, Langdon, Lyndhurst,"
                " Rugby, Winchester",
            ),
            whole("size", "size", 5, 40),
        ),
        table(
            "tour",
            "tour",
            150,
            ref("guide", 34),
            ref("group", 60),
            said(
                "route",
                "route",
                "Armour Walk, Atrium, Catacomb, Dynasty, Fossil Trail, Highlights, Jewel Trail,"
                " Mummy Walk, Sculpture",
            ),
            day("day", "date", "2022-01-01", "2023-12-31"),
            whole("minutes", "length in minutes", 30, 120, step=15),
        ),
    ),
)
