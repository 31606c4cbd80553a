use super::*;
use crate::args::{Command, Lost, PagesFrom, Patience};
use crate::size::Size;

fn parse(text: &str) -> Result<Settings, String> {
    Settings::parse(text, "/etc/lacuna/pager.toml".as_ref())
}

/// The example of docs/pager.md.
#[test]
fn the_documented_file() {
    let page = include_str!("../../../../../docs/pager.md");
    let (_, rest) = page.split_once("```toml\n").unwrap();
    let (text, _) = rest.split_once("```").unwrap();
    let settings = parse(text).unwrap();
    assert_eq!(settings.metrics, "127.0.0.1:9101".parse().ok());
    let [first, second] = &settings.images[..] else {
        panic!("{settings:?}");
    };
    assert_eq!(first.socket.to_str(), Some("/run/pager/web.socket"));
    assert_eq!(first.from, PagesFrom::File("/snapshots/web.mem".into()));
    assert_eq!(first.when_lost, Some(Lost::Kill));
    assert_eq!(first.memory, Some(Size(512 << 20)));
    assert_eq!(first.patience, Some(Patience::Forever));
    assert_eq!(first.users, [1000, 1001]);
    assert_eq!(
        (first.vms_max, first.memory_max),
        (Some(20), Some(Size(8 << 30)))
    );
    let layers = PagesFrom::Layers {
        base: "/etc/lacuna/db.mem".into(),
        diffs: vec!["/etc/lacuna/db.diff1".into(), "/snapshots/db.diff2".into()],
    };
    assert_eq!(second.from, layers);
    assert_eq!(second.socket.to_str(), Some("/etc/lacuna/db.socket"));
}

#[test]
fn both_forms_are_one() {
    let line = "lacuna pager --socket /s --from file:/m+/d --memory 1M --user 7 --when-lost hold";
    let Some(Command::Pager(args)) = crate::args::tests::parse(line).unwrap().command else {
        panic!("{line}");
    };
    let text = "[[image]]\nsocket = '/s'\nfrom = 'file:m+/d'\nmemory = '1M'\nusers = [7]\n\
                when-lost = 'hold'";
    let file = Settings::parse(text, "/pager.toml".as_ref()).unwrap();
    assert_eq!(Settings::of(&args), Ok(file));
    for (line, reason) in [
        ("lacuna pager", "--socket <SOCKET>"),
        ("lacuna pager --socket /s", "--from <SOURCE>"),
        ("lacuna pager --from zeros", "--socket <SOCKET>"),
        ("lacuna pager --config c --user 7", "cannot be used with"),
        (
            "lacuna pager --config c --metrics 1.1.1.1:1",
            "cannot be used with",
        ),
        (
            "lacuna pager --socket /s --from tape:/x",
            "is no page source",
        ),
    ] {
        let error = crate::args::tests::parse(line).unwrap_err().to_string();
        assert!(error.contains(reason), "{line}: {error}");
    }
}

#[test]
fn wrong_files() {
    let image = "[[image]]\nsocket = 's'\nfrom = 'zeros'\n";
    for (text, told) in [
        (
            "",
            "1: there is no [[image]]: add one, with socket and from",
        ),
        ("cold-after = 'soon'\n", "1: cold-after: "),
        ("metrics = 'here'\n", "1: invalid socket address"),
        ("[[image]]\nsocket = 's'\n", "1: missing field `from`"),
        ("\n[[image]]\nfrom = 'zeros'\n", "2: missing field `socket`"),
        (
            &format!("{image}sokcet = 's'"),
            "4: unknown field `sokcet`, expected one of `socket`",
        ),
        (
            "\nimages = 1\n",
            "2: unknown field `images`, expected one of `image`, `metrics`, `cold-after`",
        ),
        (
            &format!("{image}memory = 512"),
            "4: invalid type: integer `512`, expected a string",
        ),
        (
            &format!("{image}memory = 'much'"),
            "4: \"much\" does not begin with",
        ),
        (&format!("{image}patience = '5'"), "4: \"5\" has no unit"),
        (
            &format!("{image}when-lost = 'zeros'"),
            "4: unknown variant `zeros`, expected one of",
        ),
        (
            &format!("{image}users = ['root']"),
            "4: invalid type: string \"root\", expected u32",
        ),
        (
            &format!("{image}layers = ['a']"),
            "1: duplicate field `from`",
        ),
        (&format!("{image}from = 'zeros'"), "4: duplicate key"),
        (
            "[[image]]\nsocket = 's'\nfrom = 'tape:x'",
            "3: \"tape:x\" is no page source; use",
        ),
        (
            "[[image]]\nsocket = 's'\nlayers = []",
            "3: invalid length 0, expected a source such",
        ),
        (
            "[[image]]\nsocket = 's'\nlayers = 7",
            "3: invalid type: integer `7`, expected a source",
        ),
        (
            &format!("{image}{image}"),
            "4: another image has the socket /etc/lacuna/s: give",
        ),
        ("[[image]\n", "1: "),
        ("[[image]]\nsocket = 's\n", "2: "),
    ] {
        let wrong = parse(text).unwrap_err();
        let told = format!("/etc/lacuna/pager.toml:{told}");
        assert!(wrong.starts_with(&told), "{text:?}: {wrong}");
        assert!(!wrong.contains('\n'), "{wrong}");
    }
}

#[test]
fn two_images_have_two_records() {
    let image = |socket: &str| format!("[[image]]\nsocket = '{socket}'\nfrom = 'zeros'\n");
    let text = format!("{}record = 'r'\n{}record = 'r'", image("s"), image("t"));
    let wrong = parse(&text).unwrap_err();
    let told = "/etc/lacuna/pager.toml:5: another image has the record /etc/lacuna/r: give";
    assert!(wrong.starts_with(told), "{wrong}");
    assert!(parse(&(image("s") + &image("t"))).is_ok());
}
