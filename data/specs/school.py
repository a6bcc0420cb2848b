"""A boarding school."""

from specs.kit import Database, day, flag, paired, person, ref, said, table, whole
from specs.people import full_name

SCHOOL = Database(
    "school",
    "train",
    "A boarding school: teachers, pupils, courses, marks and clubs",
    (
        table(
            "teacher",
            "teacher",
            34,
            full_name("name", "name"),
            said(
                "subject",
                "subject",
                "Algebra, Astronomy, Chemistry, Civics, Drama, French, Geography, History, Latin,"
                " Physics, Statistics",
            ),
            whole("salary", "salary", 2400, 5200, step=200),
            day("hired", "hiring date", "1998-01-01", "2022-09-01"),
        ),
        table(
            "pupil",
            "pupil",
            110,
            full_name("name", "name"),
            said(
                "house",
                "house",
                "Griffin, Gryphon Hall, Phoenix, Pegasus, Unicorn, Dragon, Badger, Heron, Otter, Raven",
            ),
            said(
                "village",
                "village",
                "Aldbury, Amersham, Chipping, Cobham, Fenwick, Frome, Ludlow, Melton, Tetbury,"
                " Thaxted, Upwood, Wendover",
            ),
            flag(
                "boards",
                "boarder flag",
                "T, F",
                yes="boarding at the school",
                no="not boarding at the school",
                yes_too="staying as boarders",
                no_too="living at home",
            ),
            day("born", "date of birth", "2004-01-01", "2012-12-31"),
        ),
        table(
            "course",
            "course",
            42,
            ref("teacher", 34),
            paired(
                "title",
                "title",
                "First, Further, Applied, Modern, Élite, Practical, Advanced",
                "Numbers, Worlds, Voices, Nature, People's History, Sounds, Shapes",
            ),
            said("level", "level", "beginner, bronze, silver, standard, honours, master, intensive"),
            whole("hours", "number of hours", 20, 120, step=10),
        ),
        table(
            "mark",
            "mark",
            320,
            ref("pupil", 110),
            ref("course", 42),
            said("term", "term", "Advent, Autumn, Easter, Epiphany, Lent, Michaelmas, Trinity, Summer"),
            whole("score", "score", 20, 100, null=0.07),
            whole("week", "week of the term", 1, 14),
        ),
        table(
            "club",
            "club",
            40,
            ref("teacher", 34),
            said(
                "theme",
                "theme",
                "archery, chess, choir, debating, fencing, filming, judo, knitting, robotics,"
                " rowing, sailing",
            ),
            person(
                "captain",
                "captain",
                "Amy Barlow, Ben Carver, Chad Crosby, Dina Fuller, Ella Garner, Finn Gibson,"
                " Gail Mercer, Hank Norton, Iris Payne, Jake Sutton",
            ),
            whole("places", "number of places", 6, 30),
        ),
    ),
)
