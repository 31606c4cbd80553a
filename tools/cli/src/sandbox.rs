//! What the long-lived commands may do after their start ([`lacuna_sandbox`], docs/sandbox.md):
//! each names the files and connections of its options, and enters the sandbox before it reads one
//! of them.

use crate::args::temp_dir;
use crate::args::{JsonTarget, Output, PagesFrom, RestoreArgs, RunArgs, RunOn, SandboxArgs};
use crate::exit::Exit;
use crate::output::complain;
use lacuna::migrate::transport::Address;
use lacuna_control::store::url;
use lacuna_sandbox::{Access, Sandbox};
use std::env;
use std::path::{self, Path, PathBuf};

/// The ports of an object store, and of what it needs: HTTPS; HTTP, for credentials on a cloud's
/// host; DNS.
const STORE: [u16; 3] = [443, 80, 53];

/// Enters the sandbox of `lacuna run`.
///
/// # Errors
/// The kernel refuses the sandbox, or an option needs more.
pub fn enter_run(args: &RunArgs) -> Result<(), (Exit, String)> {
    let mut sandbox = Sandbox::new();
    sandbox.allow(&args.image, Access::Read);
    if let Some(from) = &args.pages_from {
        allow_source(&mut sandbox, from);
    }
    match &args.incoming {
        Some(Address::Unix(path)) => sandbox.allow(parent(path), Access::Remove),
        Some(Address::Exec(_)) if !args.on.sandbox.no_sandbox => {
            let text = "--incoming exec: starts a program, which the sandbox forbids: give another \
                        address, or --no-sandbox";
            return Err((Exit::Usage, text.into()));
        }
        _ => {}
    }
    allow_run(&mut sandbox, &args.on);
    enter(&sandbox, &args.on.sandbox)
}

/// Enters the sandbox of `lacuna snapshot restore`.
///
/// # Errors
/// The kernel refuses the sandbox.
pub fn enter_restore(args: &RestoreArgs) -> Result<(), (Exit, String)> {
    let mut sandbox = Sandbox::new();
    allow_snapshot(&mut sandbox, &args.folder);
    if let Some(file) = &args.replay {
        sandbox.allow(file, Access::Read);
    }
    if let Some(file) = &args.record {
        sandbox.allow(parent(file), Access::Fill);
    }
    allow_run(&mut sandbox, &args.on);
    enter(&sandbox, &args.on.sandbox)
}

fn allow_run(sandbox: &mut Sandbox, on: &RunOn) {
    if let Some(disk) = &on.disk {
        sandbox.allow(disk, Access::Write);
    }
    if let Some(socket) = &on.control {
        sandbox.allow(parent(socket), Access::Remove);
    }
    for place in &on.allow_save {
        match url(place) {
            None => sandbox.allow(place, Access::Fill),
            Some(_) => {
                allow_store(sandbox);
                // The files of a snapshot for a store.
                sandbox.allow(temp_dir(), Access::Fill);
            }
        }
    }
    allow_output(sandbox, &on.output);
}

/// Allows the file of a result, which exists already.
pub fn allow_output(sandbox: &mut Sandbox, output: &Output) {
    if let Some(JsonTarget::File(path)) = &output.json {
        sandbox.allow(path, Access::Write);
    }
}

/// Allows the files or the connections of a page source.
pub fn allow_source(sandbox: &mut Sandbox, from: &PagesFrom) {
    match from {
        PagesFrom::Zeros => {}
        PagesFrom::File(path) => sandbox.allow(path, Access::Read),
        PagesFrom::Layers { base, diffs } => [base]
            .into_iter()
            .chain(diffs)
            .for_each(|path| sandbox.allow(path, Access::Read)),
        PagesFrom::Snapshot(place) => allow_snapshot(sandbox, place),
        PagesFrom::Object(_) => allow_store(sandbox),
        PagesFrom::Peer(_) | PagesFrom::Handler(_) => sandbox.allow_unix(),
    }
}

/// Allows a snapshot. Its bases, whose names it has, lie beside it.
fn allow_snapshot(sandbox: &mut Sandbox, place: &Path) {
    match url(place) {
        Some(_) => allow_store(sandbox),
        None => sandbox.allow(parent(place), Access::Read),
    }
}

/// Allows the connections to an object store.
fn allow_store(sandbox: &mut Sandbox) {
    let named = ["AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"];
    let endpoint = named.into_iter().find_map(|name| env::var(name).ok());
    let port = endpoint.and_then(|url| {
        let (_, port) = url.trim_end_matches('/').rsplit_once(':')?;
        port.parse().ok()
    });
    let all = STORE.into_iter().chain(port);
    all.for_each(|port| sandbox.allow_port(port));
}

/// Where clients of the control socket may save the guest without descriptors: absolute folders,
/// and URLs.
pub fn save_places(on: &RunOn) -> Vec<PathBuf> {
    let place = |place: &PathBuf| match url(place) {
        Some(_) => place.clone(),
        // A path without a current folder stays as it is, and then allows nothing.
        None => path::absolute(place).unwrap_or_else(|_| place.clone()),
    };
    on.allow_save.iter().map(place).collect()
}

/// The folder with the entry `path`.
pub fn parent(path: &Path) -> &Path {
    let parent = path.parent();
    let named = parent.filter(|parent| !parent.as_os_str().is_empty());
    named.unwrap_or(Path::new("."))
}

/// Enters `sandbox`, unless the user wants none.
///
/// # Errors
/// The kernel refuses it.
pub fn enter(sandbox: &Sandbox, args: &SandboxArgs) -> Result<(), (Exit, String)> {
    if args.no_sandbox {
        return Ok(());
    }
    let entered = sandbox.enter(Exit::Host.code());
    let confined = entered.map_err(|error| {
        let text = format!("cannot enter the sandbox: {error}; --no-sandbox runs without it");
        (Exit::Host, text)
    })?;
    if let Some(text) = confined.lacks() {
        complain(&format!("the sandbox is incomplete: {text}"));
    }
    Ok(())
}
