"""A hotel."""

from specs.kit import Database, day, flag, person, plain, real, ref, said, table, whole
from specs.people import full_name

HOTEL = Database(
    "hotel",
    "dev",
    "A hotel: rooms, guests, bookings, what was charged and complaints",
    (
        table(
            "room",
            "room",
            56,
            said(
                "wing",
                "wing",
                "Ambassador, Balmoral, Buckingham, Cavendish, Imperial, Mayfair, Savoy, Sandringham, Windsor",
            ),
            plain("view", "view", "sea, garden, street", null=0.07),
            flag(
                "smoking",
                "smoking flag",
                "1, 0",
                yes="where smoking is allowed",
                no="where smoking is not allowed",
                yes_too="for smokers",
                no_too="for non-smokers",
            ),
            whole("beds", "number of beds", 1, 4),
            real("rate", "rate per night", 60, 380, cents=500),
        ),
        table(
            "guest",
            "guest",
            80,
            full_name("name", "name"),
            said(
                "origin",
                "home country",
                "Algeria, Armenia, Bolivia, Cuba, Egypt, Finland, France, Iceland, Kenya, Qatar, Thailand",
            ),
            day("born", "date of birth", "1940-01-01", "2003-12-31", null=0.08),
        ),
        table(
            "booking",
            "booking",
            200,
            ref("room", 56),
            ref("guest", 80),
            said(
                "channel",
                "channel",
                "Agoda, Airport Desk, Booker, Expedia, Kayak, Phone, Trivago, Tripster, Walk In",
            ),
            day("arrival", "arrival date", "2022-01-01", "2023-12-31"),
            whole("nights", "number of nights", 1, 12),
        ),
        table(
            "charge",
            "charge",
            260,
            ref("booking", 200),
            said(
                "item",
                "item",
                "breakfast, brunch, cocktail, dinner, garage, laundry, massage, minibar, sauna, taxi",
            ),
            real("amount", "amount", 4, 160),
        ),
        table(
            "complaint",
            "complaint",
            50,
            ref("booking", 200),
            person(
                "handler",
                "handler",
                "Adam Pike, Blanche Porter, Cecil Quayle, Della Rowe, Elmer Rhodes, Flora Stokes,"
                " Gilbert Thorne, Hazel Upton",
            ),
            said(
                "topic",
                "topic",
                "broken lamp, cold water, dirty bath, elevator, heating, hard bed, insects, smoke,"
                " thin walls",
            ),
        ),
    ),
)
