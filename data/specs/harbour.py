"""A harbour."""

from specs.kit import Database, day, flag, later, paired, person, plain, real, ref, said, table, whole

HARBOUR = Database(
    "harbour",
    "train",
    "A harbour: ships, docks, landings and the cargo they brought",
    (
        table(
            "ship",
            "ship",
            62,
            paired(
                "name",
                "name",
                "Sea, Santa, Star of, Queen, L'Étoile, Saint, Spirit of, Lady",
                "Aurora, Brasília, Clara, Dorothée, Esther, Fortune, Gloria, Hope, O'Hara",
            ),
            said(
                "flag",
                "flag",
                "Panama, Peru, Malta, Liberia, Latvia, Greece, Cyprus, Bahamas, Barbados, Estonia, Singapore",
            ),
            said(
                "owner",
                "owner",
                "Castor Lines, Corsair Freight, Maersen Group, Meridian Cargo, Neptune Shipping,"
                " Orca Marine,"
                " Albatross, Poseidon Trade, Tideway",
            ),
            whole("length", "length", 60, 330, step=5),
            whole("built", "year built", 1978, 2022),
        ),
        table(
            "dock",
            "dock",
            30,
            said(
                "zone",
                "zone",
                "Amber Quay, Iron Wharf, Ivory Pier, South Basin, Salt Quay, Eagle Pier, Rope Walk",
            ),
            real("depth", "depth", 6, 22),
            whole("cranes", "number of cranes", 0, 6),
            flag(
                "roofed",
                "roof flag",
                "Y, N",
                yes="with a roof",
                no="without a roof",
                yes_too="under a roof",
                no_too="not under a roof",
            ),
        ),
        table(
            "landing",
            "landing",
            210,
            ref("ship", 62),
            ref("dock", 30),
            person(
                "pilot",
                "pilot",
                "Anton Berg, Bella Brandt, Cyril Hayes, Dora Holt, Emil Janssen, Fleur Mercier,"
                " Gus Novak, Hilda Quist,"
                " Igor Petrov, June Wallace",
            ),
            day("arrived", "arrival date", "2021-01-01", "2023-12-10"),
            later("sailed", "departure date", "arrived", 1, 14, null=0.1),
        ),
        table(
            "cargo",
            "cargo",
            150,
            ref("landing", 210),
            said(
                "good",
                "good",
                "cocoa, cement, timber, tobacco, nickel, steel, sugar, bananas, rubber, grain, wool",
            ),
            plain("packing", "packing", "crates, sacks, bulk", null=0.08),
            whole("tons", "weight in tons", 20, 900, step=10),
            real("value", "value", 1000, 90000, cents=50000, null=0.08),
        ),
    ),
)
