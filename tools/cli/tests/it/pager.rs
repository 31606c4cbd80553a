//! `lacuna pager`, with `lacuna run --pages-from handler:SOCKET` as its VMM.

use crate::signals::Running;
use lacuna_skip::test;
use lacuna_sys::Userfaultfd;
use rustix::process::Signal;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Lines, Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{ChildStderr, Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

const MEMORY: u64 = 16 << 20;

/// A pager of a sparse memory file, its socket, its messages, and where its counters are.
struct Pager {
    process: Running,
    socket: PathBuf,
    errors: Lines<BufReader<ChildStderr>>,
    metrics: String,
    _folder: TempDir,
}

impl Pager {
    fn start() -> Self {
        Self::with("")
    }

    fn with(options: &str) -> Self {
        if let Err(errno) = Userfaultfd::open_user() {
            lacuna_skip::skip_test(errno);
        }
        let folder = TempDir::new().unwrap();
        let [file, socket] = ["memory", "pager"].map(|name| folder.path().join(name));
        File::create(&file).unwrap().set_len(MEMORY).unwrap();
        let (at, from) = (socket.display(), file.display());
        let line = format!(
            "pager --socket {at} --from file:{from} --quiet --json - --metrics 127.0.0.1:0 \
             {options}"
        );
        let mut process = Running::with_errors_to(&line, Stdio::piped(), Stdio::piped());
        let mut errors = BufReader::new(process.0.stderr.take().unwrap()).lines();
        let line = errors.next().unwrap().unwrap();
        let (_, at) = line.split_once("metrics at http://").expect("an address");
        let metrics = at.strip_suffix("/metrics").unwrap().to_owned();
        while !socket.exists() {
            std::thread::yield_now();
        }
        Self {
            process,
            socket,
            errors,
            metrics,
            _folder: folder,
        }
    }

    /// Waits until it serves `vms` VMs.
    fn wait_for_vms(&self, vms: u64) {
        let wanted = format!("\nlacuna_pager_vms {vms}\n");
        loop {
            let mut stream = TcpStream::connect(&self.metrics).unwrap();
            stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            assert!(
                answer.contains("\nlacuna_source_asked_total{image=\""),
                "{answer}"
            );
            if answer.contains(&wanted) {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Its JSON, after it has ended by `code`.
    fn result(&mut self, code: i32) -> serde_json::Value {
        assert_eq!(self.process.wait().code(), Some(code));
        let mut text = String::new();
        let stdout = self.process.0.stdout.as_mut().unwrap();
        stdout.read_to_string(&mut text).unwrap();
        serde_json::from_str(&text).unwrap()
    }
}

pub fn guest(socket: &Path, options: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lacuna"));
    let line = format!("run {options} --memory 16M --quiet --pages-from");
    command.args(line.split_whitespace());
    command.arg(format!("handler:{}", socket.display()));
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

#[test]
fn guests_run_from_one_pager() {
    let mut pager = Pager::start();
    let guests = [(); 2].map(|()| {
        let mut guest = guest(&pager.socket, "verify --append rounds=1");
        guest.spawn().unwrap()
    });
    for guest in guests {
        let ran = guest.wait_with_output().unwrap();
        let errors = String::from_utf8_lossy(&ran.stderr);
        assert_eq!(ran.status.code(), Some(0), "{errors}");
    }
    pager.process.send(Signal::TERM);
    let json = pager.result(143);
    assert_eq!(
        (&json["vms"], &json["lost"]),
        (&2.into(), &0.into()),
        "{json}"
    );
    // The guests write most of their memory.
    assert!(json["placed"].as_u64().unwrap() > 2 * 2048, "{json}");
    assert!(!pager.socket.exists());
}

/// A run with a working set needs fewer faults than the recorded one.
#[test]
fn a_working_set_is_recorded_and_filled() {
    let folder = TempDir::new().unwrap();
    let record = folder.path().join("record");
    let run = |options: &str| {
        let mut pager = Pager::with(options);
        let guest = guest(&pager.socket, "verify --append rounds=1").output();
        assert_eq!(guest.unwrap().status.code(), Some(0));
        pager.process.send(Signal::TERM);
        pager.result(143)
    };
    let lazy = run(&format!("--record {}", record.display()));
    assert_eq!(
        (&lazy["filled"], &lazy["working_set"]),
        (&0.into(), &0.into())
    );
    let pages = record.metadata().unwrap().len() / 8;
    assert!(pages > 2048, "{pages}");
    let filled = run(&format!(
        "--working-set {} --fill --fill-rate 10G",
        record.display()
    ));
    assert!(filled["working_set"].as_u64().unwrap() > 0, "{filled}");
    let count = |json: &serde_json::Value, name: &str| json[name].as_u64().unwrap();
    assert!(
        count(&filled, "placed") >= count(&filled, "filled"),
        "{filled}"
    );
    assert_eq!(count(&filled, "lost"), 0);
}

/// One process, two images, and the settings of a file.
#[test]
fn a_file_has_several_images() {
    if let Err(errno) = Userfaultfd::open_user() {
        lacuna_skip::skip_test(errno);
    }
    let folder = TempDir::new().unwrap();
    let [file, config, first, second] =
        ["memory", "pager.toml", "first", "second"].map(|name| folder.path().join(name));
    File::create(&file).unwrap().set_len(MEMORY).unwrap();
    let text = "[[image]]\nsocket = 'first'\nfrom = 'file:memory'\n\
                [[image]]\nsocket = 'second'\nfrom = 'zeros'\nmemory = '16M'\nvms-max = 1\n";
    std::fs::write(&config, text).unwrap();
    let line = format!("pager --config {} --quiet --json -", config.display());
    let mut pager = Running::with_errors_to(&line, Stdio::piped(), Stdio::inherit());
    while !second.exists() {
        std::thread::yield_now();
    }
    for socket in [&first, &second] {
        let ran = guest(socket, "hello").output().unwrap();
        let errors = String::from_utf8_lossy(&ran.stderr);
        assert_eq!(ran.status.code(), Some(0), "{errors}");
    }
    pager.send(Signal::TERM);
    assert_eq!(pager.wait().code(), Some(143));
    let json: serde_json::Value = serde_json::from_reader(pager.0.stdout.take().unwrap()).unwrap();
    assert_eq!(json["vms"], 2, "{json}");
    let [first, second] = [0, 1].map(|image| &json["images"][image]);
    assert_eq!(second["source"], "zeros", "{json}");
    assert_eq!(first["memory_bytes"], MEMORY, "{json}");
    for image in [first, second] {
        assert!(image["provided"].as_u64() > Some(0), "{json}");
    }
}

/// The first signal does not leave a VM without its pager.
#[test]
fn a_pager_ends_after_its_vms() {
    let mut pager = Pager::start();
    let options = "bm --append seconds=1000000";
    let guest = guest(&pager.socket, options).spawn().unwrap();
    let mut guest = Running(guest);
    pager.wait_for_vms(1);
    let mut top = Command::new(env!("CARGO_BIN_EXE_lacuna"));
    top.args(["pager", "top", &pager.metrics]);
    let top = top.args(["--every", "100ms", "--count", "1", "--json", "-"]);
    let json: serde_json::Value = serde_json::from_slice(&top.output().unwrap().stdout).unwrap();
    assert_eq!(json["served"][0]["pid"], guest.0.id().to_string(), "{json}");
    assert_eq!(json["served"][0]["bytes"], MEMORY, "{json}");
    pager.process.send(Signal::TERM);
    let said = pager.errors.next().unwrap().unwrap();
    assert!(said.contains("1 VMs need this pager"), "{said}");
    assert!(
        pager.process.0.try_wait().unwrap().is_none(),
        "it serves on"
    );
    guest.send(Signal::TERM);
    assert_eq!(guest.wait().code(), Some(143));
    assert_eq!(pager.result(143)["vms"], 1);
}

#[test]
fn wrong_options_are_refused() {
    let folder = TempDir::new().unwrap();
    let socket = folder.path().join("pager");
    std::fs::write(folder.path().join("odd"), "odd").unwrap();
    let odd = format!("--from file:{}/odd", folder.path().display());
    for (options, reason) in [
        ("--from handler:/h", "gives no pages to others"),
        ("--from zeros", "zeros has no length: give its memory"),
        ("--from zeros --memory 5000", "give whole pages of 4 KiB"),
        (
            "--from file:/no/such/file",
            "cannot open the memory file /no/such/file: No such file",
        ),
        ("--from file:/dev/null", "/dev/null is not a regular file"),
        (&odd, "odd has 3 bytes, which are no whole pages"),
        (
            "--from zeros --memory 1M --when-lost zeros",
            "invalid value 'zeros'",
        ),
        (
            "--from zeros --memory 1M --record /tmp/no/such/folder",
            "--record: /tmp/no/such",
        ),
        (
            "--from zeros --memory 1M --record /tmp/r --fill",
            "--record cannot be used with --fill",
        ),
        (
            "--from zeros --memory 1M --fill-rate 1M",
            "--fill-rate limits --fill",
        ),
        (
            "--from zeros --memory 1M --fill --fill-rate 0",
            "--fill-rate 0 brings nothing",
        ),
        (
            "--from zeros --memory 1M --working-set /dev/null",
            "--working-set: /dev/null: it is no regular file",
        ),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lacuna"));
        command.arg("pager").arg("--socket").arg(&socket);
        let output = command.args(options.split_whitespace()).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(errors.contains(reason), "{options}: {errors}");
        assert_eq!(output.status.code(), Some(2), "{options}");
        assert!(!socket.exists());
    }
}

/// A file has several images: an error names one.
#[test]
fn wrong_images_are_refused() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("pager.toml");
    let image = |name, more| {
        format!("[[image]]\nsocket = '{name}'\nfrom = 'zeros'\nmemory = '1M'\n{more}\n")
    };
    for (more, reason) in [
        ("fill-rate = '1M'", "/b: --fill-rate limits --fill"),
        (
            "fill = true\nfill-rate = '0'",
            "/b: --fill-rate 0 brings nothing",
        ),
    ] {
        std::fs::write(&file, image("a", "") + &image("b", more)).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_lacuna"));
        let output = command
            .arg("pager")
            .arg("--config")
            .arg(&file)
            .output()
            .unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(
            errors.contains("pager.toml: the image of ") && errors.contains(reason),
            "{errors}"
        );
    }
}
