//! Hosts with Linux memory, and their test VMs.

use super::source::{TestSource, page_with};
use super::{FakeMmu, Vm};
use lacuna_addr::{BackingAddr, PAGE_SIZE, PageCount};
use lacuna_host::{
    FaultyStore, Host, HostConfig, HostError, HugePages, Io, LinuxBacking, LinuxError, PageSource,
    PrivateFile, SourcePage, SwapStore,
};
use lacuna_sync::{HostClock, VirtualClock};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

/// The pages of 2 MiB.
pub const BLOCK: u64 = 512;

/// A host with a small budget, and addresses for `linux` pages.
pub fn host(linux: u64) -> Arc<Host> {
    let config = HostConfig {
        budget: PageCount::new(Host::minimum_budget(8).get()),
        huge: HugePages::Always,
        swap: Box::new(FaultyStore::new(PageCount::new(4000))),
        io: Io::Threads { readers: 1 },
        clock: Arc::new(HostClock::default()),
    };
    Host::with_linux_memory(config, PageCount::new(linux)).unwrap()
}

/// The origin of a region whose first page is page 0 of `source`.
pub fn origin<S: PageSource + 'static>(
    source: &Arc<S>,
) -> Option<(Arc<dyn PageSource>, SourcePage)> {
    Some((Arc::clone(source) as Arc<dyn PageSource>, SourcePage(0)))
}

/// A VM with a region of `pages` pages in `backing`. If there is a `source`, it provides them.
pub fn add(
    host: &Arc<Host>,
    backing: LinuxBacking,
    pages: u64,
    source: Option<&Arc<TestSource>>,
) -> Result<Vm, HostError> {
    let mmu = FakeMmu::of(host);
    let pages = PageCount::new(pages);
    let range = host.add_linux_region_in(backing, source.and_then(origin), pages, mmu.clone())?;
    let mut vm = Vm::of(host, &Arc::new(VirtualClock::default()), mmu, range);
    if let Some(source) = source {
        source.provides(range);
        vm.source = Some(Arc::clone(source));
    }
    Ok(vm)
}

/// As [`add`]. Ends the test if a userfaultfd cannot be made.
pub fn vm(
    host: &Arc<Host>,
    backing: LinuxBacking,
    pages: u64,
    source: Option<&Arc<TestSource>>,
) -> Vm {
    match add(host, backing, pages, source) {
        Ok(vm) => vm,
        Err(refused @ HostError::Linux(LinuxError::Userfaultfd(_))) => {
            lacuna_skip::skip_test(refused)
        }
        Err(error) => panic!("{error}"),
    }
}

/// The first word of the page at `addr`.
pub fn read(host: &Host, addr: BackingAddr) -> Result<u64, HostError> {
    let mut word = [0; 8];
    host.copy_out(addr, &mut word)?;
    Ok(u64::from_le_bytes(word))
}

/// A file with `pages` pages, each with its number. All of them are on the disk.
pub fn file(pages: u64) -> File {
    let file = tempfile::tempfile().unwrap();
    for page in 0..pages {
        let written = file.write_all_at(&page_with(page).0, page * PAGE_SIZE as u64);
        written.unwrap();
    }
    file.sync_data().unwrap();
    file
}

/// Private memory with the pages of `file` from page `first` on.
pub fn private(file: &File, first: u64) -> LinuxBacking {
    let own = OwnedFd::from(file.try_clone().unwrap());
    LinuxBacking::Private(PrivateFile::of_file(own, first).unwrap())
}

/// As [`super::virtual_host`], with addresses for `linux` pages.
pub fn virtual_host(
    budget: u64,
    swap: Box<dyn SwapStore>,
    linux: u64,
) -> (Arc<Host>, Arc<VirtualClock>) {
    let io = Io::Virtual {
        seed: 7,
        latency_ns: 1_000..200_000,
    };
    super::host((budget, linux), swap, HugePages::Never, io)
}

/// A VM with the pages of `file`, which have their numbers.
pub fn vm_of_file(host: &Arc<Host>, clock: &Arc<VirtualClock>, file: &File, pages: u64) -> Vm {
    let mmu = FakeMmu::of(host);
    let count = PageCount::new(pages);
    let range = host.add_linux_region_in(private(file, 0), None, count, mmu.clone());
    let mut vm = Vm::of(host, clock, mmu, range.unwrap());
    let numbers = (0..pages).map(|page| (vm.addr(page).get(), page));
    vm.model = numbers.collect();
    vm
}
