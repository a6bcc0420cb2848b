"""A football club."""

from specs.kit import Database, day, flag, person, plain, ref, said, table, whole
from specs.people import full_name

FOOTBALL = Database(
    "football",
    "train",
    "A football club: players, games, goals and injuries",
    (
        table(
            "player",
            "player",
            60,
            full_name("name", "name"),
            said(
                "nation",
                "nation",
                "Argentina, Austria, Croatia, Colombia, Denmark, Ecuador, Ghana, Germany, Senegal,"
                " Sweden, Tunisia",
            ),
            said(
                "position",
                "position",
                "goalkeeper, libero, left back, right back, sweeper, playmaker, winger, striker, midfielder",
            ),
            day("born", "date of birth", "1987-01-01", "2005-12-31"),
            whole("wage", "weekly wage", 900, 9000, step=300, null=0.07),
        ),
        table(
            "game",
            "game",
            64,
            said(
                "rival",
                "rival",
                "Harlow Rovers, Hexham Town, Dover Athletic, Dalton Albion, Keswick United,"
                " Stroud City, Swindle Park,"
                " Tilbury, Morpeth, Filton Rangers, Wembury",
            ),
            said(
                "stadium",
                "stadium",
                "Victory Park, Velvet Arena, Old Mill, Kings Meadow, Jubilee Ground, Granite Lane,"
                " Green Bowl, Cedar Field",
            ),
            day("day", "date", "2021-08-01", "2023-05-31"),
            whole("scored", "number of goals scored", 0, 5),
            whole("conceded", "number of goals conceded", 0, 5),
        ),
        table(
            "goal",
            "goal",
            190,
            ref("game", 64),
            ref("player", 60),
            whole("minute", "minute", 1, 94),
            plain("foot", "foot", "left, right, head", null=0.05),
            flag(
                "penalty",
                "penalty flag",
                "1, 0",
                yes="scored from a penalty",
                no="not scored from a penalty",
                yes_too="from the penalty spot",
                no_too="from open play",
            ),
        ),
        table(
            "injury",
            "injury",
            54,
            ref("player", 60),
            said("part", "body part", "ankle, knee, shoulder, groin, thigh, toe, heel, hamstring, wrist"),
            whole("weeks", "number of weeks out", 1, 16),
            person(
                "medic",
                "medic",
                "Bruno Lopez, Diane Lambert, Erik Nilsen, Fatima Rahal, Gwen Parry, Hans Pohl,"
                " Ivo Tadic, Kate Usher",
            ),
        ),
    ),
)
