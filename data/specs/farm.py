"""A farm."""

from specs.kit import Database, day, flag, person, real, ref, said, table, whole
from specs.people import full_name

FARM = Database(
    "farm",
    "train",
    "A farm: fields, crops, workers, tractors and the work done",
    (
        table(
            "field",
            "field",
            38,
            said(
                "parish",
                "parish",
                "Barnham, Burford, Colne, Cuddington, Edgeworth, Hartley, Keld, Marsham, Nunney,"
                " Stanway, Thornby",
            ),
            said("soil", "soil", "chalk, clay, gravel, loam, lava, marl, peat, sand, silt"),
            real("acres", "area in acres", 2, 60),
            flag(
                "drained",
                "drainage flag",
                "1, 0",
                yes="with drainage",
                no="without drainage",
                yes_too="that were drained",
                no_too="that were never drained",
            ),
        ),
        table(
            "crop",
            "crop",
            96,
            ref("field", 38),
            said(
                "plant",
                "plant",
                "beetroot, broccoli, cabbage, carrot, fennel, leek, lentil, maize, onion, potato,"
                " pumpkin, turnip",
            ),
            day("sown", "sowing date", "2021-02-01", "2023-06-30"),
            real("yield", "yield in tons", 1, 80, null=0.1),
        ),
        table(
            "worker",
            "worker",
            42,
            full_name("name", "name"),
            said("hut", "hut", "Anvil, Arrow, Bramble, Clover, Daisy, Fern, Fiddle, Nettle, Poppy, Thistle"),
            real("wage", "daily wage", 70, 140, cents=250),
        ),
        table(
            "tractor",
            "tractor",
            32,
            said(
                "maker",
                "maker",
                "Belarus, Case, Claas, Deutz, Ferguson, Fendt, Kubota, Landini, Steyr, Valtra",
            ),
            whole("power", "horsepower", 40, 320, step=10),
        ),
        table(
            "task",
            "task",
            240,
            ref("field", 38),
            ref("worker", 42),
            ref("tractor", 32),
            said(
                "chore",
                "chore",
                "baling, fencing work, harrowing, hauling, mowing, ploughing, pruning, raking,"
                " spraying, sowing, weeding",
            ),
            day("day", "date", "2022-01-01", "2023-11-30"),
        ),
        table(
            "lease",
            "lease",
            48,
            ref("field", 38),
            person(
                "tenant",
                "tenant",
                "Albert Croft, Bess Cobb, Cedric Dale, Edna Hardy, Fred Haywood, Giles Lamb,"
                " Hester Meadows, Joan Reeve, Saul Tanner",
            ),
            whole("rent", "rent", 200, 3600, step=100),
        ),
    ),
)
