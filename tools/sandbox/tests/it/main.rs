//! A sandbox is entered in a child process: this program, with one test of [`children`]. Without a
//! parent, these tests do nothing.

use lacuna_sandbox::{has_landlock, has_seccomp};
use lacuna_skip::test;
use std::env;
use std::path::PathBuf;
use std::process::{Command, Output};

/// The exit code of a forbidden call.
const CODE: u8 = 77;
/// What the child needs of its parent.
const GIVEN: &str = "LACUNA_SANDBOX_TEST";

/// Runs the ignored test `name` in a child.
fn child(name: &str, given: &str) -> Output {
    if !has_landlock() || !has_seccomp() {
        lacuna_skip::skip_test("this kernel has no Landlock, or no seccomp");
    }
    let mut child = Command::new(env::current_exe().unwrap());
    child.args(["--exact", name, "--nocapture"]);
    child.env(GIVEN, given).output().unwrap()
}

/// What the parent has given. `None`: no parent runs this.
fn given() -> Option<PathBuf> {
    env::var_os(GIVEN).map(PathBuf::from)
}

#[test]
fn a_forbidden_call_ends_the_process_and_says_which() {
    let output = child("children::chroot", "");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(CODE.into()), "{errors}");
    let text = "lacuna: the sandbox forbids the system call chroot (number ";
    assert!(errors.contains(text), "{errors}");
    assert!(errors.contains("--no-sandbox"), "{errors}");
}

#[test]
fn files_and_sockets_without_a_name_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let output = child("children::files", folder.path().to_str().unwrap());
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    let output = child("children::ports", "");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
}

/// Processes of the tests above.
mod children {
    use super::{CODE, given};
    use lacuna_sandbox::{Access, Sandbox};
    use lacuna_skip::test;
    use std::fs::{self, File};
    use std::io::ErrorKind;
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::process::Command;

    fn enter(sandbox: &Sandbox) {
        let confined = sandbox.enter(CODE).unwrap();
        assert_eq!(confined.lacks(), None);
    }

    #[test]
    fn chroot() {
        if given().is_none() {
            return;
        }
        enter(&Sandbox::new());
        let _ = std::os::unix::fs::chroot("/");
        panic!("the call has returned");
    }

    #[test]
    fn files() {
        let Some(folder) = given() else { return };
        let [read, written, other] = ["read", "written", "other"].map(|name| folder.join(name));
        for path in [&read, &written, &other] {
            fs::write(path, "bytes").unwrap();
        }
        let filled = folder.join("filled");
        fs::create_dir(&filled).unwrap();
        let socket = folder.join("socket");
        let listener = UnixListener::bind(&socket).unwrap();
        let mut sandbox = Sandbox::new();
        sandbox.allow(&read, Access::Read);
        sandbox.allow(&written, Access::Write);
        sandbox.allow(&filled, Access::Fill);
        sandbox.allow(folder.join("missing"), Access::Read);
        enter(&sandbox);
        let denied = |error: std::io::Error| assert_eq!(error.kind(), ErrorKind::PermissionDenied);
        assert_eq!(fs::read(&read).unwrap(), b"bytes");
        denied(fs::write(&read, "").unwrap_err());
        fs::write(&written, "").unwrap();
        fs::write(filled.join("new"), "").unwrap();
        fs::rename(filled.join("new"), filled.join("renamed")).unwrap();
        fs::remove_file(filled.join("renamed")).unwrap();
        denied(File::open(&other).unwrap_err());
        denied(fs::remove_file(&other).unwrap_err());
        denied(File::create(folder.join("new")).unwrap_err());
        let missing = File::open(folder.join("missing")).unwrap_err();
        assert_eq!(missing.kind(), ErrorKind::NotFound);
        // Threads start, and are confined too. A socket of the process still accepts.
        let refused = std::thread::spawn(move || File::open(other).unwrap_err());
        denied(refused.join().unwrap());
        let unnamed = UnixStream::connect(&socket).unwrap_err();
        assert_eq!(unnamed.kind(), ErrorKind::Unsupported);
        listener.set_nonblocking(true).unwrap();
        assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
        UnixStream::pair().unwrap();
        let process = Command::new("true").status().unwrap_err();
        assert_eq!(process.kind(), ErrorKind::Unsupported);
    }

    #[test]
    fn ports() {
        if given().is_none() {
            return;
        }
        let [named, other] = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let mut sandbox = Sandbox::new();
        sandbox.allow_port(named.local_addr().unwrap().port());
        enter(&sandbox);
        TcpStream::connect(named.local_addr().unwrap()).unwrap();
        let error = TcpStream::connect(other.local_addr().unwrap()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PermissionDenied);
        let error = TcpListener::bind("127.0.0.1:0").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PermissionDenied);
    }
}
