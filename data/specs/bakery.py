"""A chain of bakeries."""

from specs.kit import Database, day, flag, paired, person, real, ref, said, table, whole

BAKERY = Database(
    "bakery",
    "train",
    "A chain of bakeries: shops, ovens, products, sales and flour orders",
    (
        table(
            "shop",
            "shop",
            34,
            said(
                "street",
                "street",
                "Abbey Road, Baker Street, Bishop Lane, Canal Street, Church Row, Forge Lane,"
                " Garden Walk, Market Square, Mint Street, Station Road, Tanner Row",
            ),
            person(
                "manager",
                "manager",
                "Agnes Bell, Bernard Boyle, Celia Drew, Dennis Frost, Elsa Gould, Felix Hurst,"
                " Grace Hobbs, Harvey Lowe, Irene Moss, Jasper Nash",
            ),
            day("opened", "opening date", "1995-01-01", "2022-12-31"),
            whole("staff", "number of staff", 2, 16),
        ),
        table(
            "oven",
            "oven",
            48,
            ref("shop", 34),
            said(
                "brand",
                "brand",
                "Blodgett, Bongard, Hobart, Lincat, Miwe, Moretti, Pavailler, Revent, Rational, Sveba",
            ),
            whole("heat", "baking temperature", 220, 400, step=10),
            whole("age", "age in years", 0, 22, null=0.08),
        ),
        table(
            "product",
            "product",
            46,
            paired(
                "name",
                "name",
                "Farmer's, Golden, Sweet, Dark, Crunchy, Grandma's, Crème",
                "Roll, Loaf, Twist, Slice, Crown, Brioche, Knot",
            ),
            said(
                "kind",
                "kind",
                "baguette, bagel, croissant, cookie, doughnut, focaccia, muffin, pretzel, pastry,"
                " sourdough, tart",
            ),
            real("price", "price", 1, 12, cents=25),
            whole("weight", "weight in grams", 40, 1200, step=20),
            flag(
                "vegan",
                "vegan flag",
                "1, 0",
                yes="marked as vegan",
                no="not marked as vegan",
                yes_too="free of animal products",
                no_too="with animal products",
            ),
        ),
        table(
            "sale",
            "sale",
            320,
            ref("shop", 34),
            ref("product", 46),
            said("payment", "payment", "voucher, visa, cash, coupon, mastercard, gift card, invoice, wallet"),
            whole("quantity", "quantity", 1, 24),
            day("day", "date", "2023-01-01", "2023-12-31"),
        ),
        table(
            "order",
            "flour order",
            70,
            ref("shop", 34),
            said(
                "mill",
                "mill",
                "Ashby Mill, Bramley Mill, Brook Mill, Carlton Mill, Dunster Mill, Elmley Mill,"
                " Foxton Mill, Gleaston Mill",
            ),
            said(
                "flour",
                "flour",
                "barley, buckwheat, cornmeal, einkorn, millet, oat, rice, rye, semolina, spelt, wheat",
            ),
            said("sack", "sack size", "10 kilos, 25 kilos, 50 kilos"),
            whole("sacks", "number of sacks", 2, 40),
        ),
    ),
)
