"""A theatre."""

from specs.kit import Database, day, flag, paired, person, ref, said, table, whole
from specs.people import full_name

THEATRE = Database(
    "theatre",
    "train",
    "A theatre: plays, actors, shows, roles and reviews",
    (
        table(
            "play",
            "play",
            40,
            paired(
                "title",
                "title",
                "The Last, A Winter's, Madame, King, The Blind, Señor",
                "Tale, Supper, Masque, Noël, Rivals, Tempest, Oracle",
            ),
            person(
                "writer",
                "writer",
                "Anna Bellini, Bertolt Brandes, Carlo Gozzi, Ethel Goldman, Frank Wedel,"
                " George Shelton, Henrik Stroud, Luigi Marino, Maxim Orlov, Tom Yates",
            ),
            whole("acts", "number of acts", 1, 5),
            whole("year", "year written", 1880, 2021),
        ),
        table(
            "actor",
            "actor",
            46,
            full_name("name", "name"),
            said(
                "agency",
                "agency",
                "Curtain Call, Comet Talent, Encore, Footlight, Limelight, Marquee, Mosaic Talent,"
                " Proscenium, Spotlight",
            ),
            flag(
                "unionist",
                "union flag",
                "1, 0",
                yes="belonging to the union",
                no="outside the union",
                yes_too="with a union card",
                no_too="without a union card",
            ),
            whole("fee", "fee per show", 120, 900, step=20, null=0.06),
        ),
        table(
            "show",
            "show",
            130,
            ref("play", 40),
            said(
                "stage",
                "stage",
                "Apron, Arena, Balcony Stage, Courtyard, Forum, Loft, Playhouse, Rotunda, Studio",
            ),
            day("evening", "date", "2022-01-05", "2023-12-30"),
            whole("sold", "number of seats sold", 20, 480, step=10),
            said(
                "sponsor",
                "sponsor",
                "Dalia Trust, Fairbanks, Jubal Fund, Junker Society, Marlowe Trust, Maxwell Fund, Novello,"
                " Opera Friends, Saffron Club",
            ),
        ),
        table(
            "role",
            "role",
            150,
            ref("play", 40),
            ref("actor", 46),
            said(
                "character",
                "character",
                "Hamlin, Horatia, Lysander, Leontes, Miranda, Mirabel, Oberon, Perdita, Tybalt, Viola, Zanni",
            ),
            said(
                "costume",
                "costume",
                "burgundy, charcoal, coral, fuchsia, ivory, lavender, maroon, olive, sapphire, turquoise",
            ),
            whole("lines", "number of lines", 4, 320),
        ),
        table(
            "review",
            "review",
            100,
            ref("show", 130),
            said(
                "paper",
                "newspaper",
                "Beacon, Bugle, Chronicle, Courier, Dispatch, Examiner, Gazette, Herald, Observer, Tribune",
            ),
            whole("stars", "number of stars", 1, 5, null=0.1),
        ),
    ),
)
