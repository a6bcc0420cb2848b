"""A public library."""

from specs.kit import Database, day, flag, later, paired, plain, real, ref, said, table, whole
from specs.people import full_name

LIBRARY = Database(
    "library",
    "train",
    "A public library: authors, books, members, what they take home and the fines",
    (
        table(
            "author",
            "author",
            44,
            full_name("name", "name"),
            said(
                "country",
                "country",
                "Portugal, Poland, Brazil, Belgium, Canada, Chile, Japan, Mexico, Morocco, Norway,"
                " Uganda, Vietnam",
            ),
            whole("born", "birth year", 1880, 1995, null=0.1),
        ),
        table(
            "book",
            "book",
            130,
            paired(
                "title",
                "title",
                "The Quiet, A Broken, The Widow's, Our Last, The Crimson, My Father's, Beyond the, Café",
                "Orchard, Lighthouse, Winter, Ledger, Señorita, Bridge, Garden, Storm, Letters,"
                " Compass, Summer,"
                " Mirror, Secret, Journey, Violin, Map, Harvest",
            ),
            ref("author", 44),
            said(
                "genre",
                "genre",
                "mystery, memoir, fantasy, folklore, romance, travel, thriller, biography, poetry, humour",
            ),
            said(
                "publisher",
                "publisher",
                "Acorn Press, Atlas Books, Delphi House, Dolphin Editions, Kestrel Press, Larkspur,"
                " Monument,"
                " Sparrow Print, Quill Brothers, Foxglove",
            ),
            whole("year", "year of publication", 1950, 2023),
        ),
        table(
            "member",
            "member",
            80,
            full_name("name", "name"),
            said(
                "district",
                "district",
                "Northgate, Newtown, Riverside, Rosehill, Elmwood, Eastfield, Hightown,"
                " Castle Hill, Docklands, Meadow",
            ),
            plain("card", "card", "adult, child, senior", null=0.06),
            flag(
                "active",
                "active flag",
                "Y, N",
                yes="marked as active",
                no="no longer active",
                yes_too="still active",
                no_too="not marked as active",
            ),
            day("joined", "joining date", "2010-01-01", "2023-06-30"),
        ),
        table(
            "checkout",
            "checkout",
            300,
            ref("book", 130),
            ref("member", 80),
            said("desk", "desk", "Alder, Aspen, Birch, Beech, Hazel, Juniper, Willow, Cypress"),
            day("taken", "checkout date", "2022-01-01", "2023-12-20"),
            later("returned", "return date", "taken", 2, 45, null=0.12),
        ),
        table(
            "fine",
            "fine",
            70,
            ref("checkout", 300),
            said(
                "reason",
                "reason",
                "late return, lost copy, torn page, wet cover, missing disc, marked text, noise",
            ),
            real("sum", "amount", 1, 25),
        ),
    ),
)
