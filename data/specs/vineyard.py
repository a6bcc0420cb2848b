"""A vineyard."""

from specs.kit import Database, day, flag, paired, person, real, ref, said, table, whole
from specs.people import full_name

VINEYARD = Database(
    "vineyard",
    "train",
    "A vineyard: plots, pickers, harvests, wines and shipments",
    (
        table(
            "plot",
            "plot",
            40,
            said(
                "hill",
                "hill",
                "Belvedere, Bellamonte, Chapel Hill, Falcon Ridge, Fox Slope, Golden Rise,"
                " Lark Hill, Miller Slope, Oak Ridge, Pine Rise",
            ),
            said(
                "grape",
                "grape",
                "Barbera, Chardonnay, Cabernet, Grenache, Gamay, Malbec, Merlot, Nebbiolo,"
                " Riesling, Syrah, Tempranillo, Zinfandel",
            ),
            real("area", "area", 1, 9, cents=25),
            whole("planted", "year of planting", 1962, 2019),
        ),
        table(
            "picker",
            "picker",
            44,
            full_name("name", "name"),
            said(
                "crew",
                "crew",
                "Blue Crew, Black Crew, Crimson Crew, Emerald Crew, Golden Crew, Indigo Crew,"
                " Orange Crew, Purple Crew, Scarlet Crew",
            ),
            real("wage", "hourly wage", 11, 19, cents=50),
        ),
        table(
            "harvest",
            "harvest",
            150,
            ref("plot", 40),
            ref("picker", 44),
            person(
                "foreman",
                "foreman",
                "Alain Besson, Benoit Chauvet, Claire Colbert, Denis Dufour, Elise Gautier,"
                " Fabien Girard, Gerard Lacroix, Helene Martel, Ivan Perrin, Jules Renard",
            ),
            day("day", "date", "2021-08-20", "2023-10-20"),
            whole("kilos", "weight in kilos", 40, 900, step=10),
        ),
        table(
            "wine",
            "wine",
            48,
            ref("plot", 40),
            paired(
                "label",
                "label",
                "Château, Old, Cuvée, Saint, Rosé",
                "Belle, Émile, D'Or, Vigne, Soleil, Lune, Noir, Pierre, Claire, Automne",
            ),
            said(
                "cellar",
                "cellar",
                "Arches, Barrel Room, Crypt, Dungeon, Grotto, Gallery, North Vault, Tunnel, Tower",
            ),
            flag(
                "organic",
                "organic flag",
                "T, F",
                yes="certified as organic",
                no="not certified as organic",
                yes_too="marked organic",
                no_too="not marked organic",
            ),
            real("price", "price", 6, 80),
        ),
        table(
            "shipment",
            "shipment",
            180,
            ref("wine", 48),
            said(
                "buyer",
                "buyer",
                "Bistro Luna, Bodega Sol, Casa Verde, Club Mirage, Domus, Enoteca, Hotel Astor,"
                " Maison Rouge, Monarch, Osteria, Taverna",
            ),
            said("size", "bottle size", "37 centilitres, 75 centilitres, 150 centilitres"),
            whole("bottles", "number of bottles", 6, 240, step=6),
            day("sent", "shipping date", "2022-01-01", "2023-12-31", null=0.08),
        ),
    ),
)
