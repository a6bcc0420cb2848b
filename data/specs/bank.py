"""A bank."""

from specs.kit import Database, day, person, plain, real, ref, said, table, whole
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
                "Architect, Butcher, Carpenter, Dentist, Florist, Goldsmith, Jeweller, Lawyer,"
                " Librarian, Plumber, Tailor",
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
                "Checking, Custody, Deposit, Escrow, Joint, Pension, Payroll, Savings, Student, Trading",
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
                "Alimony, Charity, Dividend, Electricity, Groceries, Gym, Insurance, Mortgage,"
                " Repayment, Tuition, Utilities, Wages",
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
            real("sum", "sum", 1000, 50000, cents=50000),
            real("rate", "interest rate", 1, 9, cents=25, null=0.1),
            plain("state", "state", "open, repaid, overdue"),
        ),
    ),
)
