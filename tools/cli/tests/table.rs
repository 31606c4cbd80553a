//! Every way in which the command refuses or fails: the command line, the message, the exit code.
//!
//! A row is a line for `sh`, run in a folder of its own, because limits and redirections are a part
//! of it. `$LACUNA` is the command; `text.elf` is a guest that prints control characters; `big.elf`
//! has 32 MiB to be loaded.

mod elf;

use assert_cmd::Command;
use std::path::Path;
use std::time::Duration;

const LACUNA: &str = env!("CARGO_BIN_EXE_lacuna");

/// What a row needs of the machine.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Needs {
    Nothing,
    /// A mount namespace of its own, for a small file system at `small`.
    Mount,
    /// `script`, for a terminal.
    Terminal,
    /// Another user, without other processes: limits on their number do not hold for root.
    User,
}
use Needs::{Mount, Nothing, Terminal, User};

/// Runs a command line as another user, which has no other processes.
const AS_USER: [&str; 5] = [
    "--reuid=64321",
    "--clear-groups",
    "prlimit",
    "--nproc=8",
    "sh",
];

/// A row: what it needs, the line, the exit code, fragments of the output in any order.
type Row = (Needs, &'static str, i32, &'static [&'static str]);

const TABLE: &[Row] = &[
    // Arguments.
    (Nothing, "$LACUNA run", 2, &["<IMAGE>"]),
    (
        Nothing,
        "$LACUNA run hello --memory much",
        2,
        &["does not begin with a whole number"],
    ),
    (
        Nothing,
        "$LACUNA run hello --resident 64K",
        2,
        &["memory budget too small: 16 pages for 2 vCPUs"],
    ),
    (
        Nothing,
        "$LACUNA run hello --backend xen",
        2,
        &["[possible values: soft, kvm, auto]"],
    ),
    (
        Nothing,
        "$LACUNA run hello --backend kvm --seed 1",
        2,
        &["--seed needs the soft backend: leave it out, or give --backend soft or auto"],
    ),
    (
        Nothing,
        "$LACUNA run hello --backend kvm --thp never",
        2,
        &["--thp needs the soft backend"],
    ),
    (
        Nothing,
        "$LACUNA run hello --backend kvm --swap file",
        2,
        &["--swap file needs the soft backend"],
    ),
    (
        Nothing,
        "$LACUNA run hello --backend auto --seed 1 --memory 64M --resident 64M",
        0,
        &["trace", "done"],
    ),
    (Nothing, "$LACUNA walk", 2, &["unrecognized subcommand"]),
    (
        Nothing,
        "$LACUNA run hello --swap tape",
        2,
        &["is no swap device"],
    ),
    (
        Nothing,
        "$LACUNA run hello --memory 18446744073709551615",
        2,
        &[
            "--memory 16777216T",
            "at most 511G",
            "give --memory 511G or less",
        ],
    ),
    (
        Nothing,
        "$LACUNA run text.elf --memory 18446744073709551615",
        2,
        &["guest memory of 18446744073709551615 bytes: give at least 1M and at most 64T"],
    ),
    (
        Nothing,
        "$LACUNA run hello --memory 2T",
        2,
        &["--memory 2T: the built-in guests take at most 511G"],
    ),
    (
        Nothing,
        "$LACUNA run hello --memory 1M",
        2,
        &["the guest needs at least 2M of memory"],
    ),
    (
        Nothing,
        "$LACUNA run hello --resident 1M --vcpus 64",
        2,
        &["for 64 vCPUs", "(24832 KiB)", "budget too small"],
    ),
    (
        Nothing,
        "$LACUNA run hello --vcpus 65",
        2,
        &["65 is not in 1..=64"],
    ),
    (
        Nothing,
        "$LACUNA run hello --memory 64M --resident 32M --vcpus 64",
        0,
        &["hello from a guest: 64 vCPU"],
    ),
    // Images.
    (
        Nothing,
        "$LACUNA run nosuch",
        2,
        &["neither a built-in guest (bm, "],
    ),
    (
        Nothing,
        "mkfifo fifo; $LACUNA run fifo",
        2,
        &["fifo: an image must be a regular file"],
    ),
    (
        Nothing,
        "$LACUNA run /dev/zero",
        2,
        &["/dev/zero: an image must be a regular file"],
    ),
    (
        Nothing,
        "$LACUNA run .",
        2,
        &["an image must be a regular file"],
    ),
    (
        Nothing,
        "truncate -s 1T sparse; $LACUNA run sparse",
        2,
        &["sparse: larger than 1G", "strip"],
    ),
    (
        Nothing,
        "echo text > text; $LACUNA run text",
        2,
        &["not an ELF file"],
    ),
    // The host.
    (
        Nothing,
        "$LACUNA run hello --swap file,dir=/proc",
        3,
        &["cannot create a swap file in /proc"],
    ),
    (
        Nothing,
        "ulimit -v 400000; $LACUNA run hello --memory 64M --resident 16M",
        3,
        &["address space for translation tables", "ulimit -v"],
    ),
    (
        Nothing,
        "ulimit -v 8000000; $LACUNA run text.elf --memory 16T --resident 64M --vcpus 1",
        3,
        &["no room for 34", "give the guest less memory", "ulimit -v"],
    ),
    (
        Nothing,
        "ulimit -f 2000; $LACUNA run verify --memory 64M --resident 16M --swap file,dir=.",
        3,
        &["swap device full", "File too large"],
    ),
    (
        Nothing,
        "ulimit -f 2000; $LACUNA run big.elf --memory 64M --resident 8M --swap file,dir=.",
        3,
        &["cannot load the image", "swap device full"],
    ),
    (
        Mount,
        "$LACUNA run big.elf --memory 64M --resident 8M --swap file,dir=small",
        3,
        &["cannot load the image", "No space left on device"],
    ),
    (
        Mount,
        "$LACUNA run verify --memory 64M --resident 16M --swap file,dir=small",
        3,
        &["swap device full", "No space left on device"],
    ),
    (
        User,
        "$LACUNA run verify --memory 64M --resident 32M --vcpus 64 --swap mem",
        3,
        &["cannot start its thread", "fewer vCPUs", "ulimit -u"],
    ),
    // The guest.
    (
        Nothing,
        "$LACUNA run triple --memory 16M --resident 16M",
        1,
        &["outcome   vCPU 0: triple fault: vector "],
    ),
    // Output that cannot be written.
    (
        Nothing,
        "$LACUNA run hello --memory 16M --resident 16M --quiet --json - > /dev/full",
        3,
        &[
            "cannot write the JSON to stdout: No space left on device",
            "run again, with --json and a file that can be written",
        ],
    ),
    (
        Nothing,
        "$LACUNA run hello --memory 16M --resident 16M > /dev/full",
        3,
        &["cannot write the text to stdout"],
    ),
    (
        Nothing,
        "$LACUNA run hello --memory 16M --resident 16M --quiet --json - >&-",
        0,
        &[],
    ),
    (Nothing, "$LACUNA doctor --json >&-", 0, &[]),
    // Read-write, as Python's subprocess.DEVNULL is.
    (
        Nothing,
        "$LACUNA run hello --memory 16M --resident 16M --quiet --json - 1<>/dev/null",
        0,
        &[],
    ),
    (Nothing, "$LACUNA doctor --json 1<>/dev/null", 0, &[]),
    (
        Nothing,
        "$LACUNA run hello --memory 16M --resident 16M --quiet --json - > /dev/null",
        0,
        &[],
    ),
    (
        Nothing,
        "$LACUNA run hello --memory 16M --resident 16M --json /dev/full",
        3,
        &["cannot write the JSON to /dev/full", "outcome   done"],
    ),
    (
        Nothing,
        "ulimit -f 0; $LACUNA run hello --memory 16M --resident 16M --json out.json",
        3,
        &["cannot write the JSON to out.json: File too large"],
    ),
    (
        Nothing,
        "$LACUNA lab base --json nosuch/out.json",
        3,
        &["cannot write the JSON to nosuch/out.json: No such file"],
    ),
    (
        Nothing,
        "$LACUNA run hello --memory 16M --resident 16M 2> /dev/full",
        0,
        &["outcome   done"],
    ),
    (Nothing, "$LACUNA run nosuch 2> /dev/full", 2, &[]),
    (
        Nothing,
        "{ $LACUNA run hello --memory 16M --resident 16M 2>&1; echo code $? >&3; } 3>&2 | true",
        0,
        &["code 0"],
    ),
    (
        Nothing,
        "$LACUNA --help > /dev/full",
        3,
        &["cannot write to stdout"],
    ),
    (
        Nothing,
        "$LACUNA doctor > /dev/full",
        3,
        &["cannot write the text to stdout"],
    ),
    (
        Nothing,
        "$LACUNA doctor --json > /dev/full",
        3,
        &["cannot write the JSON to stdout"],
    ),
    (
        Nothing,
        "{ $LACUNA doctor; echo code $? >&3; } 3>&2 | true",
        0,
        &["code 0"],
    ),
    // What the guest prints.
    (
        Nothing,
        "$LACUNA run text.elf --memory 16M --resident 16M --vcpus 1 --quiet",
        0,
        &["\x1b]0;title\x07 end"],
    ),
    (
        Terminal,
        "$LACUNA run text.elf --memory 16M --resident 16M --vcpus 1 --quiet",
        0,
        &["\\u{1b}]0;title\\u{7} end"],
    ),
    (
        Terminal,
        "$LACUNA run text.elf --memory 16M --resident 16M --vcpus 1",
        0,
        &["\\u{1b}]0;title\\u{7} end"],
    ),
];

/// What is missing to run a row here, if anything.
fn lacking(needs: Needs) -> Option<&'static str> {
    let works = |program: &str, args: &[&str]| {
        let tried = std::process::Command::new(program).args(args).output();
        tried.is_ok_and(|output| output.status.success())
    };
    let mount = ["-rm", "mount", "-t", "tmpfs", "none", "/mnt"];
    match needs {
        Nothing => None,
        Mount => (!works("unshare", &mount)).then_some("no mount namespace (unshare -rm)"),
        User => {
            let runs = [&AS_USER[..], &["-c", "exec \"$0\" --version", LACUNA]].concat();
            (!works("setpriv", &runs)).then_some("no other user may run it (setpriv, prlimit)")
        }
        Terminal => (!works("script", &["-qec", "true", "/dev/null"]))
            .then_some("no terminal can be opened (script, of util-linux)"),
    }
}

fn shell(dir: &Path, needs: Needs, line: &str) -> Command {
    let (program, args): (&str, Vec<String>) = match needs {
        Nothing => ("sh", vec!["-c".into(), line.into()]),
        Mount => {
            let mounted = format!("mkdir small && mount -t tmpfs -o size=4m none small && {line}");
            let args = ["-rm", "sh", "-c", &mounted];
            ("unshare", args.map(str::to_owned).to_vec())
        }
        User => {
            let args = [&AS_USER[..], &["-c", line]].concat();
            ("setpriv", args.into_iter().map(str::to_owned).collect())
        }
        Terminal => {
            let args = ["-qec", line, "/dev/null"];
            ("script", args.map(str::to_owned).to_vec())
        }
    };
    let mut command = Command::new(program);
    command.args(args).current_dir(dir);
    command.env("LACUNA", LACUNA);
    command.timeout(Duration::from_secs(120));
    command
}

#[test]
fn every_refusal_and_failure_has_its_message_and_code() {
    let mut wrong = Vec::new();
    for &(needs, line, code, fragments) in TABLE {
        if let Some(why) = lacking(needs).or_else(|| no_guest_for(line)) {
            lacuna_skip::skip(format!("{why}: {line}"));
            continue;
        }
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(
            dir.path().join("text.elf"),
            elf::printing("\x1b]0;title\x07 end\n"),
        )
        .unwrap();
        if line.contains("big.elf") {
            std::fs::write(dir.path().join("big.elf"), elf::of_size(32 << 20)).unwrap();
        }
        let output = shell(dir.path(), needs, line).output().unwrap();
        let text = [&output.stdout[..], &output.stderr[..]].concat();
        let text = String::from_utf8_lossy(&text);
        let missing: Vec<_> = fragments.iter().filter(|f| !text.contains(**f)).collect();
        if output.status.code() != Some(code) || !missing.is_empty() {
            wrong.push(format!(
                "{line}\n  {}, wanted {code}; missing {missing:?} in:\n{text}",
                output.status
            ));
        }
    }
    assert!(
        wrong.is_empty(),
        "{} rows:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}

/// Under any limit of address space the command ends by itself: it runs the guest, or reports that
/// this host cannot run it.
/// Why there is no guest for `line`, if it needs one and the build has none. The refusal of a name
/// lists the guests that are built in, so that row needs them too.
fn no_guest_for(line: &str) -> Option<&'static str> {
    let name = line
        .split_once("run ")
        .and_then(|(_, rest)| rest.split_whitespace().next());
    let needs_one = line.contains(" lab")
        || name.is_some_and(|name| name == "nosuch" || lacuna_guest::is_known(name));
    lacuna_guest::unavailable().filter(|_| needs_one)
}

#[test]
fn every_limit_of_address_space_is_a_refusal_at_worst() {
    if let Some(reason) = lacuna_guest::unavailable() {
        lacuna_skip::skip(reason);
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    for megabytes in [300, 1000, 4200, 4300, 4400, 4580, 4700, 5200, 9000] {
        let line = format!(
            "ulimit -v {megabytes}000; $LACUNA run hello --memory 64G --resident 64M --quiet"
        );
        let output = shell(dir.path(), Nothing, &line).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        let code = output.status.code();
        assert!(
            matches!(code, Some(0 | 3)),
            "{line}: {} {text}",
            output.status
        );
    }
}

#[test]
fn help_and_the_page_of_commands_agree() {
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/commands.md");
    let page = words(&std::fs::read_to_string(page).unwrap());
    let dir = tempfile::tempdir().unwrap();
    for command in ["", "run", "lab", "doctor"] {
        let line = format!("$LACUNA {command} --help");
        let help = shell(dir.path(), Nothing, &line).output().unwrap().stdout;
        let help = words(&String::from_utf8_lossy(&help));
        assert!(
            help.contains(&words(lacuna_cli::exit::EXIT_CODES)),
            "{line}: {help}"
        );
    }
    assert!(
        page.contains(&words(lacuna_cli::exit::EXIT_CODES)),
        "{page}"
    );
    for guest in lacuna_guest::images() {
        let name = format!("`{}`", guest.name);
        assert!(page.contains(&name), "{name} is missing");
    }
}
