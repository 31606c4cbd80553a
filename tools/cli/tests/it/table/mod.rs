//! All refusals and failures of the command: the command line, the message, the exit code.
//!
//! A row is a line for `sh`, run in a folder of its own. It may contain limits and redirections.
//! `$LACUNA` is the command; `text.elf` is a guest that prints control characters; `big.elf` has 32
//! MiB to load; `loop.elf` has 8 MiB, and loops for ever.

mod elf;
mod rows;

use Needs::{Mount, Nothing, Terminal, User};
use assert_cmd::Command;
use rows::{Needs, TABLE};
use std::path::Path;
use std::time::Duration;

const LACUNA: &str = env!("CARGO_BIN_EXE_lacuna");

/// Runs a command line as another user, which has no other processes.
const AS_USER: [&str; 5] = [
    "--reuid=64321",
    "--clear-groups",
    "prlimit",
    "--nproc=8",
    "sh",
];

/// The missing need of a row here, if any.
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
        if line.contains("loop.elf") {
            std::fs::write(dir.path().join("loop.elf"), elf::looping(8 << 20)).unwrap();
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

/// Why there is no guest for `line`, if it needs one and the build has none. The refusal of a name
/// lists the built-in guests, so that row needs them too.
fn no_guest_for(line: &str) -> Option<&'static str> {
    let name = line
        .split_once("run ")
        .and_then(|(_, rest)| rest.split_whitespace().next());
    let needs_one = line.contains(" lab")
        || name.is_some_and(|name| name == "nosuch" || lacuna_guest::is_known(name));
    lacuna_guest::unavailable().filter(|_| needs_one)
}

/// Under any limit of address space the command ends by itself: it runs the guest, or reports that
/// this host cannot run it.
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
fn help_and_the_pages_agree() {
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let page = |name| {
        let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
        words(&std::fs::read_to_string(docs.join(name)).unwrap())
    };
    let dir = tempfile::tempdir().unwrap();
    for command in ["", "run", "serve", "lab", "doctor"] {
        let line = format!("$LACUNA {command} --help");
        let help = shell(dir.path(), Nothing, &line).output().unwrap().stdout;
        let help = words(&String::from_utf8_lossy(&help));
        assert!(
            help.contains(&words(lacuna_cli::exit::EXIT_CODES)),
            "{line}: {help}"
        );
    }
    let commands = page("commands.md");
    assert!(
        commands.contains(&words(lacuna_cli::exit::EXIT_CODES)),
        "{commands}"
    );
    let guests = page("guide/run.md");
    for guest in lacuna_guest::images() {
        let name = format!("`{}`", guest.name);
        assert!(guests.contains(&name), "{name} is missing");
    }
}
