"""An airline."""

from specs.kit import Database, day, flag, person, ref, said, table, whole
from specs.people import full_name

AIRLINE = Database(
    "airline",
    "train",
    "An airline: planes, pilots, routes, flights and tickets",
    (
        table(
            "plane",
            "plane",
            38,
            said(
                "model",
                "model",
                "Airbus, Antonov, Boeing, Bombardier, Cessna, Comet, Dornier, Embraer, Fokker,"
                " Learjet, Tupolev",
            ),
            said("hangar", "hangar", "Apollo, Ares, Hermes, Hera, Juno, Mercury, Triton, Vulcan"),
            whole("seats", "number of seats", 18, 320, step=2),
            flag(
                "leased",
                "lease flag",
                "Y, N",
                yes="on lease",
                no="not on lease",
                yes_too="that were leased",
                no_too="that were not leased",
            ),
            whole("bought", "year of purchase", 1996, 2022),
        ),
        table(
            "captain",
            "captain",
            36,
            full_name("name", "name"),
            said(
                "base",
                "base",
                "Athens, Ankara, Bologna, Bremen, Cracow, Dublin, Dresden, Geneva, Helsinki, Naples, Zagreb",
            ),
            whole("salary", "salary", 4000, 12000, step=500),
            day("licensed", "licence date", "1995-01-01", "2021-12-31"),
        ),
        table(
            "route",
            "route",
            44,
            said(
                "origin",
                "origin",
                "Aberdeen, Alicante, Cork, Cologne, Dakar, Faro, Girona, Hanover, Izmir, Larnaca,"
                " Luton, Nantes",
            ),
            said(
                "target",
                "destination",
                "Beirut, Boston, Cairo, Calgary, Delhi, Havana, Jakarta, Lima, Lagos, Nairobi, Quito, Tokyo",
            ),
            whole("distance", "distance in kilometres", 300, 11000, step=50),
        ),
        table(
            "flight",
            "flight",
            240,
            ref("route", 44),
            ref("plane", 38),
            ref("captain", 36),
            day("day", "date", "2023-01-01", "2023-12-31"),
            whole("delay", "delay in minutes", 0, 120, step=5, null=0.1),
        ),
        table(
            "ticket",
            "ticket",
            320,
            ref("flight", 240),
            said("cabin", "cabin", "business, basic, comfort, economy, first, flexible, premium"),
            person(
                "agent",
                "agent",
                "Abel Castro, Brigitte Caron, Dario Monti, Emma Duarte, Franz Engel, Gina Esposito,"
                " Henrik Falk, Irma Ganz, Julian Heller",
            ),
            whole("fare", "fare", 60, 1900, step=20),
        ),
    ),
)
