"""A ski resort."""

from specs.kit import Database, day, flag, paired, person, ref, said, table, whole
from specs.people import full_name

RESORT = Database(
    "resort",
    "test",
    "A ski resort: lifts, slopes, skiers, lessons and rescues",
    (
        table(
            "lift",
            "lift",
            32,
            said(
                "valley",
                "valley",
                "Aosta, Engadin, Fassa, Gardena, Lauter, Maurienne, Montafon, Stubai, Tarentaise,"
                " Ziller, Zermatt",
            ),
            said(
                "system",
                "system",
                "bubble, cable car, chairlift, funicular, gondola, magic carpet, rope tow, tramway",
            ),
            flag(
                "heated",
                "heating flag",
                "T, F",
                yes="with heated seats",
                no="without heated seats",
                yes_too="marked as heated",
                no_too="not marked as heated",
            ),
            whole("length", "length in metres", 200, 3800, step=50),
            whole("opened", "year of opening", 1961, 2021),
        ),
        table(
            "slope",
            "slope",
            48,
            ref("lift", 32),
            paired(
                "name",
                "name",
                "Devil's, White, Upper, Lower, Étoile, Hermann",
                "Run, Bowl, Mile, Couloir, Path, Jump, Face, Glade",
            ),
            said(
                "grade",
                "grade",
                "Black Diamond, Blue Square, Double Black, Family Green, Novice, Red Circle,"
                " Snowpark, Yellow Freeride",
            ),
            whole("fall", "fall in metres", 60, 1200, step=20, null=0.06),
        ),
        table(
            "skier",
            "skier",
            90,
            full_name("name", "name"),
            said(
                "home",
                "home town",
                "Antwerp, Augsburg, Bordeaux, Eindhoven, Ghent, Innsbruck, Lyon, Lucerne, Parma,"
                " Rotterdam, Utrecht, Wroclaw",
            ),
            day("born", "date of birth", "1950-01-01", "2016-12-31"),
        ),
        table(
            "lesson",
            "lesson",
            180,
            ref("skier", 90),
            person(
                "coach",
                "coach",
                "Anders Vik, Bastien Vallet, Corinne Roche, Dieter Huber, Eva Hofer, Flavio Rossi,"
                " Georg Unger, Hanna Tveit, Luca Zanetti, Nils Winther",
            ),
            said(
                "style",
                "style",
                "alpine, backcountry, carving, freestyle, langlauf, moguls, monoski, slalom, telemark",
            ),
            whole("price", "price", 40, 240, step=10),
            day("day", "date", "2022-12-01", "2023-04-15"),
        ),
        table(
            "rescue",
            "rescue",
            70,
            ref("slope", 48),
            ref("skier", 90),
            said(
                "team",
                "rescue team",
                "Avalanche Dogs, Bernard Unit, Chamois Unit, Eagle Crew, Falcon Crew, Frost Patrol,"
                " Ibex Unit, Sledge Crew",
            ),
            whole("minutes", "duration in minutes", 10, 180, step=5, null=0.08),
        ),
    ),
)
