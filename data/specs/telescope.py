"""A space telescope."""

from specs.kit import Database, day, flag, paired, person, plain, real, ref, said, table, whole
from specs.people import full_name

TELESCOPE = Database(
    "telescope",
    "test",
    "A space telescope: astronomers, targets, instruments, exposures and alerts",
    (
        table(
            "astronomer",
            "astronomer",
            36,
            full_name("name", "name"),
            said(
                "institute",
                "institute",
                "Arcetri, Caltech, Cambridge, Garching, Heidelberg, Harvard, Kyoto, Leicester,"
                " Meudon, Potsdam, Toronto",
            ),
            whole("since", "year of first proposal", 1994, 2023),
        ),
        table(
            "target",
            "target",
            74,
            paired(
                "name",
                "name",
                "NGC, HD, Kepler, Barnard's, Gliese, Böhm",
                "11, 27, 31, 42, 58, 63, 77, 86, 90, 104, 131, 188, 205",
            ),
            said(
                "constellation",
                "constellation",
                "Andromeda, Aquila, Cassiopeia, Cygnus, Draco, Gemini, Hydra, Lyra, Orion, Perseus,"
                " Taurus, Ursa",
            ),
            plain("type", "type", "star, galaxy, nebula, cluster"),
            real("distance", "distance", 4, 900, null=0.1),
            real("brightness", "brightness", 1, 15, cents=10),
        ),
        table(
            "instrument",
            "instrument",
            30,
            said("band", "band", "gamma, infrared, microwave, optical, radio, terahertz, ultraviolet"),
            said(
                "builder",
                "builder",
                "Ballard, Dynamics Lab, Fairchild, Lockwood, Leonardo, Matra, Thales, Teledyne, Zeiss",
            ),
            flag(
                "cooled",
                "cooling flag",
                "Y, N",
                yes="with cooling",
                no="without cooling",
                yes_too="that were cooled",
                no_too="that were not cooled",
            ),
            whole("mass", "mass in kilos", 20, 600, step=10),
        ),
        table(
            "exposure",
            "exposure",
            280,
            ref("target", 74),
            ref("instrument", 30),
            ref("astronomer", 36),
            day("night", "night", "2022-01-01", "2023-12-31"),
            whole("seconds", "length in seconds", 30, 3600, step=30),
        ),
        table(
            "alert",
            "alert",
            80,
            ref("exposure", 280),
            said(
                "cause",
                "cause",
                "cosmic ray, dropped link, glare, gyro drift, jammed shutter, low power,"
                " overheating, solar flare, vibration",
            ),
            person(
                "officer",
                "officer on duty",
                "Aisha Nwosu, Bjorn Nygaard, Celeste Oduya, Dev Patel, Elif Pamuk, Goran Savic,"
                " Hana Shimizu, Ilya Turgenev, Kim Underhill",
            ),
            whole("level", "level", 1, 5),
        ),
    ),
)
