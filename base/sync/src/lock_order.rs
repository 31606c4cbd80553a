//! The order of the locks (`docs/locking.md`).
//!
//! Each lock of the memory, engine, processor, backend, migration, pager and virtio crates has a
//! type here, which is a parameter of the lock's own type:
//!
//! ```
//! use lacuna_sync::{Mutex, lock_order};
//!
//! struct Slots {
//!     writer: Mutex<(), lock_order::SlotsWriter>,
//! }
//! ```
//! A thread takes locks in ascending order of their [`Rank`]s. It never holds two locks of one
//! rank, except range locks of one [`RangeLocks`](crate::RangeLocks), in ascending order. Debug
//! builds assert this at each lock, and that no thread waits while it holds a lock of
//! [`Rank::Slots`] or a later one. In release builds a lock is exactly the standard library's.

/// The ranks, from the outermost to the innermost.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Rank {
    /// The readers of a VM's log of writes. The holder harvests the log, so it may wait.
    Log,
    /// One operation on a VM at a time. The holder may wait for vCPUs, I/O and other threads.
    Vm,
    /// Taken by the holder of a [`Rank::Vm`] lock, and may wait as well.
    Vcpus,
    /// The writer of the memory slots. From here on the holder waits for no event.
    Slots,
    /// Range locks of stage 2.
    Blocks,
    /// Registers of devices: the holder raises an interrupt line.
    Devices,
    /// Locks whose holders take one leaf lock, or call a console.
    Outer,
    /// Locks under which no other lock is taken.
    Leaf,
}

impl Rank {
    /// Whether the holder of a lock of this rank may wait for an event.
    pub const fn may_wait(self) -> bool {
        matches!(self, Self::Log | Self::Vm | Self::Vcpus)
    }
}

/// A lock of the order.
pub trait LockClass {
    /// Its place in the order.
    const RANK: Rank;
    /// Its name in messages: the field with the lock.
    const NAME: &'static str;
}

macro_rules! classes {
    ($($rank:ident: $($class:ident $name:literal),+;)+) => {$($(
        #[doc = concat!("`", $name, "`, of [`Rank::", stringify!($rank), "`].")]
        pub enum $class {}

        impl LockClass for $class {
            const RANK: Rank = Rank::$rank;
            const NAME: &'static str = $name;
        }
    )+)+};
}

classes! {
    Log:
        LogReaders "LogReaders (machine)";
    Vm:
        MmuLayout "Mmu::layout",
        IncomingConnections "Listener::candidates (migrate)",
        KvmDirty "Dirty::state (kvm)",
        ExclusiveTurn "Exclusive::turn (soft)";
    Vcpus:
        DirtyRings "Tracking::rings (mmu)",
        KvmPause "VcpuKicks::turn (kvm)",
        RemoteWants "RemotePages::wants (migrate)";
    Slots:
        SlotsWriter "Slots::writer";
    Blocks:
        RangeLock "range lock";
    Devices:
        VirtioRegisters "Shared::control (virtio)";
    Outer:
        RegionNumbers "Regions::numbers (host)",
        CompressedStore "MemoryStore::inner (host)",
        KvmWindow "Window::table (kvm)",
        InterruptLines "InterruptLines::users (machine)",
        EventFds "EventFds (soft, kvm)",
        PagerVm "Vm::live (pager)",
        Serial "PlatformDevices::serial",
        OutgoingSession "OutgoingHandle's state (migrate)",
        IncomingSession "IncomingHandle's state (migrate)";
    Leaf:
        TableLists "Arena::lists",
        DepositedTables "Stage2::deposits",
        FreeFrames "Frames::free (frames)",
        RegionTable "Regions::list (host)",
        LinuxAddresses "LinuxAddresses (linux)",
        LinuxTouchers "FillHandler::threads (linux)",
        LinuxTouches "Pool of touching threads (linux)",
        LostLinuxPages "Losses (host, Linux memory)",
        SwapEntries "Core::entries (host)",
        Tickets "Core::tickets (host)",
        LostPages "Core::lost (host)",
        PageCaches "Core::caches (host)",
        SpareCaches "Host::spare_caches",
        SampledSplit "Core::sampled_splits (host)",
        Collapsing "Core::collapsing (host)",
        CollapseHand "Core::collapser (host)",
        WriteBuffers "Core::buffers (host)",
        WriteFailure "Core::failure (host)",
        BackgroundThread "Core::background (host)",
        SettledCount "Settled::generation (host)",
        TicketResult "Ticket::done (host)",
        RingSubmission "Ring::submission (host)",
        RingCompletion "Ring::completion (host)",
        RingFlights "Ring::flights (host)",
        TimerThread "Timer::thread (host)",
        TimerQueue "Timer::queue (host)",
        ReaderQueue "Readers::queue (host)",
        ReaderHandles "Readers::handles (host)",
        VirtualQueue "Virtual::queue (host)",
        FaultyDevice "FaultyStore::inner (host)",
        SourceTimes "Measured::times (source)",
        SourceOpen "Measured::open (source)",
        SourceAsked "MemoryFile::asked (source)",
        SourceReaders "Readers::queue (source)",
        SourceThreads "Readers::threads (source)",
        SourceLink "Peer::link (source)",
        SourceServed "Connection::asked (source)",
        SourceConnections "Server::connections (source)",
        SourceDelays "Injected::queue (source)",
        ObjectChunks "Chunks::state (objects)",
        SourceHandler "External::handler (source)",
        SourceListeners "External::listeners (source)",
        SourceDeath "External::dead (source)",
        SourceOutage "Outage::reason (source)",
        PagerUnits "Vm::gathering (pager)",
        PagerShared "SharedPages::asked (pager)",
        PagerWaiting "WaitingList (pager)",
        PagerFill "UnitRequester::gathering (pager)",
        PagerRequests "Window::queue (pager)",
        PagerQuota "Quota (pager)",
        PagerStalls "Stalls (pager)",
        PagerVms "PagerShared::vms (pager)",
        PagerThread "Pager::thread (pager)",
        PagerFound "StateFolder::found (pager)",
        PagerKept "Supervisor::kept (pager)",
        ApfArrivals "Arrivals::list (apf)",
        DirtyCounts "Tracking::counts (mmu)",
        PlatformEnding "PlatformDevices::ending",
        RunPause "Pause::state (machine)",
        RemotePages "RemotePages::pages (migrate)",
        EarlyPages "EarlyPages::placed (migrate)",
        PagesLeft "RemainingPages::pages (migrate)",
        TimeOfRun "RemainingPages::ran (migrate)",
        RunsToCopy "Work::runs (migrate)",
        PagesThere "There::pages (migrate)",
        HashesThere "There::hashes (migrate)",
        CauseOfEnd "Streams::cause (migrate)",
        MigrationLink "Link (migrate)",
        FirstConnection "first of Connector and Accepted, Arrival::incoming (migrate)",
        VirtioInput "Console::input (virtio)",
        VirtioOutput "Console::output (virtio)",
        VirtioWire "Net::waits (virtio)",
        Gic "Gic::shared (arm64)",
        IoApic "ApicBus::io_apic (x86)",
        TlbInbox "Vcpu::inbox (arm64)",
        SoftParker "Parker::state (soft)",
        SoftInbox "CodeMap::inboxes (soft)",
        SoftStalls "Meter::stalls (soft)",
        SoftApfStats "Meter::apf (soft)",
        SoftBacking "Vm::backing (soft)",
        SoftTokens "Vm::tokens (soft)",
        IoEventFds "IoEventFds (soft)",
        Touches "Recorder::asked (source)",
        KvmKick "VcpuKick::state (kvm)",
        KvmFailure "FaultState::failure (kvm)",
        KvmAgain "FaultState::again (kvm)",
        KvmTokens "Tokens (kvm)",
        KvmHeld "Provider::held (kvm)",
        KvmComing "FaultState::coming (kvm)";
}
