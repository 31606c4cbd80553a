//! Exits on missing memory: behaviour of this backend alone.

use crate::common;

use common::arm64::{ADDED, BASE, FAR, Held, PAGE, add_page};
use common::program::{self, CODE, tell, write_msr};
use common::{Zeros, boot_image, boot_with, builder, builder_for, on_both, pass};
use iced_x86::code_asm::*;
use lacuna_addr::PageCount;
use lacuna_machine::{
    Apf, Arch, Exit, FaultToken, Kick as _, MemoryFaultFlags, MemorySlots as _, MissingMemory as _,
    PageRequest, PageSource, ReadyOutcome, SlotFlags, SlotId, SourcePage, TokenError, Vcpu as _,
    dispatch,
};
use lacuna_skip::test;
use lacuna_soft::{SlotSpec, Step, Swap, VmBuilder, Wait};
use lacuna_sync::{Clock, HostClock};
use std::sync::Arc;

on_both!(
    tokens_are_forgotten_at_a_reset,
    a_guest_gets_an_event_for_a_slow_page,
    a_vm_ends_with_requests_unanswered,
);

/// A reset forgets an accepted and a pending token. Each later report of the VMM about them has one
/// outcome.
fn tokens_are_forgotten_at_a_reset(arch: Arch) {
    let builder = VmBuilder {
        apf: Apf::On,
        source: Some(Arc::new(Zeros)),
        ..builder_for(arch, (16, 24), 1, "faulters=4 workers=1 accesses=100")
    };
    let clock: Arc<dyn Clock> = Arc::new(HostClock::default());
    let host = builder.host(Arc::clone(&clock)).unwrap();
    let (vm, mut vcpus, devices, _) = boot_with(&builder, &host, clock, "bm", |_| ());
    for slot in vm.memory_slots() {
        let set = vm.set_slot_flags(slot.id, SlotFlags::EXIT_ON_MISSING);
        set.unwrap();
    }
    let vcpu = &mut vcpus[0];
    let next = |vcpu: &mut lacuna_soft::Vcpu, flag: MemoryFaultFlags| -> FaultToken {
        loop {
            match vcpu.run() {
                Ok(Exit::MemoryFault { flags, token, .. }) if flags.contains(flag) => return token,
                Ok(Exit::MemoryFault { gpa, .. }) => {
                    vm.provide(gpa, &[0; 4096]).unwrap();
                }
                exit => _ = dispatch(vcpu, exit, &devices, &*vm),
            }
            vm.mmu().verify();
            assert_eq!(devices.ending(), None);
        }
    };
    let accepted = next(vcpu, MemoryFaultFlags::CAN_NOTIFY);
    assert_eq!(vcpu.accept(accepted), Ok(()));
    vcpu.reset();
    assert_eq!(vm.ready(accepted), Ok(ReadyOutcome::Cancelled));
    assert_eq!(vm.ready(accepted), Err(TokenError::Unknown));
    vcpu.verify();
    // The guest starts again.
    let pending = next(vcpu, MemoryFaultFlags::empty());
    vcpu.reset();
    assert_eq!(vm.ready(pending), Err(TokenError::Unknown));
    assert_eq!(vcpu.accept(pending), Err(TokenError::Unknown));
    let again = next(vcpu, MemoryFaultFlags::empty());
    assert_ne!(again, pending);
    assert_eq!(vm.ready(again), Ok(ReadyOutcome::Early));
    vm.mmu().verify();
    host.verify();
}

/// An exit of an AArch64 vCPU has the abort that EL2 would read. This guest writes its page tables
/// before it uses them, so no stage-1 walk needs a missing page.
#[test]
fn an_exit_has_its_stage_2_abort() {
    let builder = VmBuilder {
        source: Some(Arc::new(Zeros)),
        ..builder_for(
            Arch::Arm64,
            (16, 24),
            1,
            "faulters=1 workers=1 accesses=100",
        )
    };
    let clock: Arc<dyn Clock> = Arc::new(HostClock::default());
    let host = builder.host(Arc::clone(&clock)).unwrap();
    let (vm, mut vcpus, devices, _) = boot_with(&builder, &host, clock, "bm", |_| ());
    for slot in vm.memory_slots() {
        vm.set_slot_flags(slot.id, SlotFlags::EXIT_ON_MISSING)
            .unwrap();
    }
    let mut aborts = 0;
    while devices.ending().is_none() {
        let exit = vcpus[0].run();
        let abort = vcpus[0].as_arm64().unwrap().stage2_abort();
        let Ok(Exit::MemoryFault { gpa, flags, .. }) = exit else {
            assert_eq!(abort, None, "{exit:?}");
            let _ = dispatch(&mut vcpus[0], exit, &devices, &*vm);
            continue;
        };
        let abort = abort.unwrap();
        assert_eq!(abort.hpfar << 8, gpa.get());
        // It is a translation fault, at any level.
        assert_eq!(abort.esr & 0b11_1100, 0b00_0100, "{abort:x?}");
        let (class, walk) = (abort.esr >> 26, abort.esr >> 7 & 1);
        let of_fetch = flags.contains(MemoryFaultFlags::EXEC);
        let of_write = flags.contains(MemoryFaultFlags::WRITE);
        assert_eq!(class, [0x24, 0x20][usize::from(of_fetch)], "{abort:x?}");
        assert_eq!(walk, 0, "{abort:x?}");
        assert_eq!(abort.esr >> 6 & 1 == 1, of_write, "{abort:x?}");
        aborts += 1;
        vm.provide(gpa, &[0; 4096]).unwrap();
        assert_eq!(vcpus[0].as_arm64().unwrap().stage2_abort(), Some(abort));
        vm.mmu().verify();
    }
    host.verify();
    assert_eq!(devices.ending(), Some(lacuna_machine::Ending::Exited(0)));
    assert!(aborts > 100, "{aborts} aborts");
}

/// In a slot without exits, the guest gets an event for a slow page of its source, however fast its
/// swap is. It gets none for a page that arrives at once.
fn a_guest_gets_an_event_for_a_slow_page(arch: Arch) {
    struct Late(std::sync::Mutex<std::sync::mpsc::Sender<PageRequest>>);
    impl PageSource for Late {
        fn describe(&self) -> String {
            "late".into()
        }

        fn fetch(&self, request: PageRequest) {
            self.0.lock().unwrap().send(request).unwrap();
        }
    }
    let events_with = |source: Arc<dyn PageSource>| {
        let builder = VmBuilder {
            apf: Apf::On,
            swap: Swap::Memory,
            source: Some(source),
            ..builder_for(arch, (16, 24), 1, "faulters=4 workers=1 accesses=200")
        };
        let (outcome, _) = pass(&builder, "bm");
        outcome.apf[0].taken
    };
    let (sender, requests) = std::sync::mpsc::channel::<PageRequest>();
    let thread = std::thread::spawn(move || {
        for request in requests {
            std::thread::sleep(std::time::Duration::from_micros(300));
            let _ = request.provide(&[0; 4096]);
        }
    });
    let taken = events_with(Arc::new(Late(std::sync::Mutex::new(sender))));
    thread.join().unwrap();
    assert!(taken > 50, "the guest got events for {taken} pages");
    assert_eq!(events_with(Arc::new(Zeros)), 0);
}

/// A VM drops its source, and the unanswered requests end with it.
fn a_vm_ends_with_requests_unanswered(arch: Arch) {
    struct Never(std::sync::Mutex<Vec<PageRequest>>);
    impl PageSource for Never {
        fn describe(&self) -> String {
            "never".into()
        }

        fn fetch(&self, request: PageRequest) {
            self.0.lock().unwrap().push(request);
        }
    }
    let source = Arc::new(Never(std::sync::Mutex::default()));
    let builder = VmBuilder {
        source: Some(Arc::clone(&source) as Arc<dyn PageSource>),
        ..builder_for(arch, (16, 24), 1, "")
    };
    let vm = lacuna_machine::Builder::build(&builder).unwrap();
    let first = vm.memory_slots()[0].gfns.start();
    let gpa = |page: u64| first.checked_add(page).unwrap().gpa();
    for page in 0..10 {
        vm.fetch(gpa(page), None).unwrap();
        vm.fetch(gpa(page), None).unwrap();
    }
    let asked = source.0.lock().unwrap().len();
    assert_eq!(asked, 10, "each page once");
    vm.provide(gpa(3), &[7; 4096]).unwrap();
    vm.mmu().verify();
    drop(vm);
    for request in source.0.lock().unwrap().drain(..) {
        let answer = request.provide(&[1; 4096]);
        assert_eq!(answer, lacuna_machine::Answer::Late);
    }
    assert_eq!(Arc::strong_count(&source), 2, "the builder's, and this one");
}

/// A vCPU waits for a page without another exit, because the event cannot be delivered. This holds
/// only for that page: another page at the same address, in a later slot, causes an exit.
#[test]
fn a_refused_token_does_not_outlive_its_page() {
    const LATER: u64 = 1 << 30;
    const SLOT: SlotId = SlotId(7);
    let code = program::assemble(CODE, |a| {
        let mut again = a.create_label();
        a.mov(rsi, LATER)?;
        a.set_label(&mut again)?;
        a.mov(eax, dword_ptr(rsi))?;
        a.out(0x80, eax)?;
        a.jmp(again)
    });
    let builder = VmBuilder {
        source: Some(Arc::new(Zeros)),
        ..builder(16, 24, 1, "")
    };
    let clock: Arc<dyn Clock> = Arc::new(HostClock::default());
    let host = builder.host(Arc::clone(&clock)).unwrap();
    let image = program::image(std::slice::from_ref(&code));
    let (vm, mut vcpus, ..) = boot_image(&builder, &host, clock, &image, |_| ());
    let vcpu = &mut vcpus[0];
    for content in [1, 2] {
        let notifier = vm.mmu().notifier();
        let pages = PageCount::new(16);
        let backing = host.add_region_from(Arc::new(Zeros), SourcePage(0), pages, notifier);
        let spec = SlotSpec {
            id: SLOT,
            guest: LATER,
            backing: backing.unwrap().start(),
            bytes: 16 << 12,
            flags: SlotFlags::EXIT_ON_MISSING,
        };
        vm.add_slot(spec).unwrap();
        let (done, is_done) = std::sync::mpsc::channel();
        let waits = &vm;
        let exit = std::thread::scope(|scope| {
            // This kick makes a waiting vCPU leave, so that this test ends.
            scope.spawn(move || {
                if is_done
                    .recv_timeout(std::time::Duration::from_secs(60))
                    .is_err()
                {
                    waits.kick(0);
                }
            });
            let exit = vcpu.run();
            // An error means that the limit is over, which the exit shows.
            let _ = done.send(());
            exit
        });
        let Ok(Exit::MemoryFault { gpa, token, .. }) = exit else {
            panic!("{exit:?}");
        };
        assert_eq!(gpa.get(), LATER);
        assert_eq!(vcpu.accept(token), Err(TokenError::CannotNotify));
        vm.provide(gpa, &[content; 4096]).unwrap();
        match vcpu.run() {
            Ok(Exit::IoOut { value, .. }) => assert_eq!(value, u32::from(content) * 0x0101_0101),
            other => panic!("{other:?}"),
        }
        vm.mmu().verify();
        vm.remove_slot(SLOT).unwrap();
        vm.mmu().verify();
        host.verify();
    }
}

/// The host may write the area of async page faults when the guest acknowledges. If its page is
/// missing, the vCPU waits outside the instruction, and a kick ends the wait.
#[test]
fn acknowledging_waits_for_the_area() {
    const AREA: u64 = 1 << 30;
    const AGAIN: u64 = 5;
    let code = program::assemble(CODE, |a| {
        write_msr(a, 0x4b56_4d02, AREA as u32 | 1 | 1 << 3)?;
        tell(a, 1)?;
        write_msr(a, 0x4b56_4d07, 1)?;
        tell(a, 2)
    });
    let builder = VmBuilder {
        apf: Apf::On,
        ..builder(16, 24, 1, "")
    };
    let clock: Arc<dyn Clock> = Arc::new(HostClock::default());
    let host = builder.host(Arc::clone(&clock)).unwrap();
    let image = program::image(std::slice::from_ref(&code));
    let (vm, mut vcpus, ..) = boot_image(&builder, &host, clock, &image, |_| ());
    let vcpu = &mut vcpus[0];
    let source = Arc::new(Held::default());
    let said = |exit| match exit {
        Ok(Exit::IoOut { value, .. }) => value,
        other => panic!("{other:?}"),
    };
    add_page(&vm, &source, AREA, SourcePage(0));
    assert_eq!(said(vcpu.run()), 1);
    vm.remove_slot(ADDED).unwrap();
    let far = (FAR - BASE) / PAGE;
    add_page(&vm, &source, AREA, SourcePage(far + AGAIN));
    let waits = |step| match step {
        Step::Wait(Wait::Page(ticket)) => {
            host.start(&ticket);
            true
        }
        Step::Exit(exit) => panic!("{exit:?}"),
        _ => false,
    };
    assert!((0..10).any(|_| waits(vcpu.step(1000))));
    let kicker = Arc::clone(&vm);
    let kicker = std::thread::spawn(move || kicker.kick(0));
    assert_eq!(vcpu.run(), Ok(Exit::Interrupted));
    kicker.join().unwrap();
    source.provide(AGAIN);
    assert_eq!(said(vcpu.run()), 2);
    vm.mmu().verify();
    host.verify();
}
