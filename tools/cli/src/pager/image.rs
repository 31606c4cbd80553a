//! An image of `lacuna pager`: its source, its fill, its record and its socket.

use super::host;
use crate::args::{Lost, PagedImage, Patience};
use crate::exit::{Exit, transport_refusal};
use crate::output::complain;
use crate::run::Refusal;
use crate::sandbox::{allow_source, parent};
use crate::size::Size;
use crate::source::{open_to_serve, whole_pages};
use lacuna::PageCount;
use lacuna::metrics::Metrics;
use lacuna::migrate::transport::PrivateSocket;
use lacuna::source::{
    Measured, PageSource, Policy, TouchedMemory, Touches, TouchesError, WhenGone,
};
use lacuna_lab::report::time;
use lacuna_pager::{Fill, FillRate, Image, Pager, Record, StateFolder};
use lacuna_sandbox::{Access, Sandbox};
use serde::Serialize;
use std::fs::{Permissions, set_permissions};
use std::num::NonZeroU64;
use std::os::fd::AsFd as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

type Source = Measured<Box<dyn PageSource>>;

/// The pages of one image, for all of its VMs.
#[derive(Serialize)]
pub struct ImageReport {
    socket: PathBuf,
    source: String,
    memory_bytes: u64,
    asked: u64,
    provided: u64,
    failed: u64,
    p50_ns: u128,
    p99_ns: u128,
    p999_ns: u128,
}

/// An image with its source and its socket.
pub struct OpenImage {
    is: PagedImage,
    source: Arc<Source>,
    pages: PageCount,
    record: Option<Arc<Record>>,
}

impl OpenImage {
    pub fn open(is: PagedImage) -> Result<Self, Refusal> {
        if is.record.is_some() && is.fills() {
            let text = "--record cannot be used with --fill and --working-set: a filled VM has \
                        fewer faults; record without them";
            return Err(usage(text.into()));
        }
        if is.fill_rate.is_some() && !is.fills() {
            let text = "--fill-rate limits --fill and --working-set: give one of them";
            return Err(usage(text.into()));
        }
        let pages = is.memory.map(|memory| whole_pages(memory.0)).transpose()?;
        let policy = Patience::policy(is.patience);
        // The first signal must not end the reads of served VMs.
        let never = Arc::default();
        let (source, pages) = open_to_serve(&is.from, pages, policy, &never)?;
        let source = Arc::new(Measured::new(source));
        let record = record(&is, pages).map_err(|error| usage(format!("--record: {error}")))?;
        Ok(Self {
            is,
            source,
            pages,
            record,
        })
    }

    /// Makes the socket. VMs wait until they are served.
    pub fn listen(&self, state: Option<&StateFolder>) -> Result<PrivateSocket, Refusal> {
        let path = &self.is.socket;
        let socket = listen(path, state)?;
        if !self.is.users.is_empty() {
            // Each user can connect, and the pager refuses all but the named ones.
            let opened = set_permissions(path, Permissions::from_mode(0o666));
            opened.map_err(|error| host(format!("{}: {error}", path.display())))?;
        }
        Ok(socket)
    }

    /// Allows what its source, its records and its socket need.
    pub fn allow(&self, sandbox: &mut Sandbox) {
        allow_source(sandbox, &self.is.from);
        sandbox.allow(parent(&self.is.socket), Access::Remove);
        if let Some(file) = &self.is.record {
            sandbox.allow(parent(file), Access::Fill);
        }
        if let Some(file) = &self.is.working_set {
            sandbox.allow(file, Access::Read);
        }
        if self.is.when_lost == Some(Lost::Kill) {
            sandbox.allow_processes();
        }
    }

    /// Serves the VMs that connect to `socket`.
    pub fn serve(&self, pager: &Pager, socket: &PrivateSocket) -> Result<(), Refusal> {
        let mut image = Image {
            when_lost: self.is.when_lost.unwrap_or_default().into(),
            vms_max: self.is.vms_max,
            memory_max: self.is.memory_max.map(|most| most.0),
            fill: fill_of(&self.is, self.pages)?,
            record: self.record.clone(),
            ..Image::new(Arc::clone(&self.source) as Arc<dyn PageSource>, self.pages)
        };
        image.users.extend(&self.is.users);
        let listener = socket.listener().try_clone();
        let listener = listener.map_err(|error| host(format!("no descriptor is left: {error}")))?;
        let serves = pager.serve(listener, image);
        serves.map_err(|error| host(format!("cannot start a thread: {error}")))
    }

    /// The path of its socket.
    pub fn socket(&self) -> &Path {
        &self.is.socket
    }

    /// Writes the record, if there is one.
    pub fn save_record(&self) {
        let saved = self.record.as_ref().map_or(Ok(()), |record| record.save());
        saved.unwrap_or_else(|error| complain(&error.to_string()));
    }

    /// Puts the counters of its source into `to`.
    pub fn fill(&self, to: &mut Metrics) {
        let socket = self.is.socket.display().to_string();
        let mut own = Metrics::default();
        self.source.stats().fill(&mut own);
        to.extend(&own, &[("image", &socket)]);
    }

    /// The pages that its source has provided.
    pub fn provided(&self) -> u64 {
        self.source.stats().provided
    }

    /// Its result.
    pub fn report(&self) -> ImageReport {
        let stats = self.source.stats();
        ImageReport {
            socket: self.is.socket.clone(),
            source: self.is.from.to_string(),
            memory_bytes: self.pages.bytes(),
            asked: stats.asked,
            provided: stats.provided,
            failed: stats.failed,
            p50_ns: stats.p50.as_nanos(),
            p99_ns: stats.p99.as_nanos(),
            p999_ns: stats.p999.as_nanos(),
        }
    }

    /// Its size, its source and its socket.
    pub fn name(&self) -> String {
        let (size, socket) = (Size(self.pages.bytes()), self.is.socket.display());
        format!("{size} from {} at {socket}", self.is.from)
    }

    /// How its source does.
    pub fn times(&self) -> String {
        let stats = self.source.stats();
        let [p50, p99, p999] =
            [stats.p50, stats.p99, stats.p999].map(|t| time(t.as_nanos() as u64));
        let outage = self.source.outage();
        let outage = outage.map_or_else(String::new, |why| format!("; it gives no page: {why}"));
        format!("p50 {p50}, p99 {p99}, p99.9 {p999}{outage}")
    }
}

fn usage(text: String) -> Refusal {
    (Exit::Usage, text)
}

/// The record of `--record`. An unwritable file is refused before a VM is served.
fn record(is: &PagedImage, pages: PageCount) -> Result<Option<Arc<Record>>, TouchesError> {
    let record = |path: &PathBuf| {
        Touches::check_target(path)?;
        Ok(Arc::new(Record::new(path.clone(), pages)))
    };
    is.record.as_ref().map(record).transpose()
}

/// What `--working-set` and `--fill` bring.
fn fill_of(is: &PagedImage, pages: PageCount) -> Result<Option<Fill>, Refusal> {
    if !is.fills() {
        return Ok(None);
    }
    let memory = TouchedMemory {
        checksum: None,
        pages: pages.get(),
    };
    let working_set = is.working_set.as_deref();
    let working_set = working_set.map(|path| Touches::load(path, memory));
    let refused = |error: TouchesError| usage(format!("--working-set: {error}"));
    let none = || usage("--fill-rate 0 brings nothing: give more".into());
    let rate = is
        .fill_rate
        .map(|size| NonZeroU64::new(size.0).map(FillRate::new).ok_or_else(none));
    // The faults' source decides about lost pages. This one waits.
    let policy = Policy {
        when_gone: WhenGone::Hold,
        ..Policy::default()
    };
    let (source, _) = open_to_serve(&is.from, Some(pages), policy, &Arc::default())?;
    Ok(Some(Fill {
        source: Arc::from(source),
        working_set: working_set.transpose().map_err(refused)?,
        is_whole: is.fill,
        rate: rate.transpose()?,
    }))
}

/// The socket, which a service manager may have kept since the last pager.
fn listen(path: &Path, state: Option<&StateFolder>) -> Result<PrivateSocket, Refusal> {
    let Some(state) = state else {
        return PrivateSocket::bind(path).map_err(transport_refusal);
    };
    if let Some(listener) = state.supervisor().listener(path) {
        return Ok(PrivateSocket::inherited(path, listener));
    }
    // The folder's lock keeps other pagers from doing the same.
    let socket = PrivateSocket::bind_again(path).map_err(transport_refusal)?;
    state.supervisor().keep_listener(socket.listener().as_fd());
    Ok(socket)
}
