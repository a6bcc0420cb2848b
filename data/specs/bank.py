"""A bank."""

from specs.kit import Database, day, flag, person, plain, real, ref, said, table, whole
from specs.people import full_name

BANK = Database(
    "bank",
    "test",
    "A bank: branches, clients, accounts, transfers and loans",
    (
        table(
            "branch",
            "branch",
            30,
            said(
                "quarter",
                "quarter",
                "Altstadt, Belgrave, Chinatown, Chelsea, Harlem, Kreuzberg, Montmartre, Mission,"
                " Soho, Trastevere, Vesterbro",
            ),
            day("opened", "opening date", "1972-01-01", "2019-12-31"),
            flag(
                "atm",
                "cash machine flag",
                "1, 0",
                yes="with a cash machine",
                no="without a cash machine",
                yes_too="where there is a cash machine",
                no_too="where there is no cash machine",
            ),
            whole("desks", "number of desks", 2, 14),
        ),
        table(
            "client",
            "client",
            92,
            full_name("name", "name"),
            said(
                "trade",
                "trade",
                "architect, butcher, carpenter, dentist, florist, goldsmith, jeweller, lawyer,"
                " librarian, plumber, tailor",
            ),
            said(
                "rating",
                "rating",
                "Diamond Tier, Emerald Tier, Jasper Tier, Onyx Tier, Opal Tier, Quartz Tier, Ruby Tier",
            ),
            day("born", "date of birth", "1938-01-01", "2004-12-31"),
        ),
        table(
            "account",
            "account",
            150,
            ref("client", 92),
            ref("branch", 30),
            said(
                "kind",
                "kind",
                "checking, custody, deposit, escrow, joint, pension, payroll, savings, student, trading",
            ),
            real("balance", "balance", 0, 60000, cents=25000),
            day("begun", "date of opening", "2005-01-01", "2023-06-30"),
        ),
        table(
            "transfer",
            "transfer",
            340,
            ref("account", 150),
            said(
                "purpose",
                "purpose",
                "alimony, charity, dividend, electricity, groceries, gym, insurance, mortgage,"
                " repayment, tuition, utilities, wages",
            ),
            real("amount", "amount", 5, 4000, cents=500),
            day("day", "date", "2022-01-01", "2023-12-31"),
        ),
        table(
            "loan",
            "loan",
            84,
            ref("client", 92),
            person(
                "advisor",
                "advisor",
                "Arlo Jensen, Bettina Jarvis, Cosmo Kettle, Dolores Lavigne, Ernst Mahler,"
                " Fiona Marsh, Gustav Orban, Hilary Pratt, Ivor Quill",
            ),
            real("sum", "amount", 1000, 50000, cents=50000),
            real("rate", "interest rate", 1, 9, cents=25, null=0.1),
            plain("state", "state", "open, repaid, overdue"),
        ),
    ),
)
