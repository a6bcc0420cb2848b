"""A newspaper."""

from specs.kit import Database, day, paired, person, ref, said, table, whole
from specs.people import full_name

NEWSPAPER = Database(
    "newspaper",
    "train",
    "A newspaper: reporters, articles, readers, their comments and advertisements",
    (
        table(
            "reporter",
            "reporter",
            36,
            full_name("name", "name"),
            said(
                "section",
                "section",
                "Arts, Crime, Culture, Economy News, Fashion, Finance, Opinion, Politics, Science,"
                " Sport, Weather",
            ),
            day("joined", "joining date", "1999-01-01", "2022-12-31"),
            whole("salary", "salary", 2200, 6400, step=200),
        ),
        table(
            "article",
            "article",
            150,
            ref("reporter", 36),
            paired(
                "headline",
                "headline",
                "Mayor's, Secret, New, Angry, Lost, Record, Minister's, Café, Sudden",
                "Plan, Letter, Vote, Strike, Dog, Bridge, Budget, Flood, Party, Trial, Speech,"
                " Garden, Error, Fire, Visit, Prize, Deal",
            ),
            person(
                "editor",
                "editor",
                "Aldo Brusco, Beth Calder, Colin Cramer, Daphne Dietz, Evan Flynn, Freya Gilroy,"
                " Gordon Hewitt, Heidi Hume, Isaac Knox, Judith Lyle",
            ),
            whole("words", "number of words", 120, 2400, step=20),
            day("printed", "date of printing", "2022-01-01", "2023-12-31"),
        ),
        table(
            "reader",
            "reader",
            100,
            full_name("name", "name"),
            said(
                "county",
                "county",
                "Antrim, Berkshire, Cheshire, Cornwall, Devon, Dorset, Essex, Kent, Norfolk,"
                " Rutland, Suffolk, Surrey",
            ),
            said(
                "plan", "plan", "Campus, Digital, Family, Gold Pass, Platinum, Print Only, Trial, Weekender"
            ),
            whole("since", "year of first subscription", 1985, 2023, null=0.08),
        ),
        table(
            "comment",
            "comment",
            220,
            ref("article", 150),
            ref("reader", 100),
            said(
                "mood",
                "mood",
                "amused, bored, cheerful, doubtful, furious, grateful, gloomy, proud, sad, worried",
            ),
            whole("votes", "number of votes", 0, 60),
        ),
        table(
            "advert",
            "advertisement",
            90,
            ref("article", 150),
            said(
                "client",
                "client",
                "Bluebird Cafes, Brightway, Crown Motors, Delta Phones, Fresco Foods,"
                " Hightower Homes, Lumen Lamps, Nimbus Travel, Sunrise Soap, Solara",
            ),
            said(
                "place",
                "placement",
                "back page, banner, centerfold, footer, front page, sidebar, inset, margin",
            ),
            said("state", "payment state", "paid, unpaid, part paid, refunded, cancelled"),
            whole("price", "price", 100, 3000, step=50),
        ),
    ),
)
