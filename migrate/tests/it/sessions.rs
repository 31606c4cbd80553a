//! Sessions, which make their own connections.

use lacuna_addr::PageCount;
use lacuna_machine::{
    Arch, Builder as _, CpuModel, Ending, Image, Pause, PlatformDevices, Vm as _, run_pausable,
};
use lacuna_migrate::session::{Destination, IncomingStage, Outcome, Outgoing, Stayed};
use lacuna_migrate::stream::{Arrived, Plan};
use lacuna_migrate::transport::{Address, Connector, Listener};
use lacuna_migrate::{Guest, MigrateError};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::thread;

fn builder() -> lacuna_soft::VmBuilder {
    let memory = PageCount::from_bytes(6 << 20);
    lacuna_soft::VmBuilder {
        cpu: CpuModel::Common { tsc_khz: None },
        ..lacuna_soft::VmBuilder::new(memory, memory)
    }
}

fn devices() -> PlatformDevices {
    PlatformDevices::of(Arch::X86_64, |line: &str| println!("{line}"))
}

/// Takes the third guest: the first one is refused, and its run was ended; the second one is given
/// up while its memory arrives.
fn arrive(destination: &Destination) {
    let refused = destination.wait().unwrap().expect("a guest");
    refused.refuse("not today");
    refused.handle().end(Some("stopped"));
    drop(refused);

    let given_up = destination.wait().unwrap().expect("a guest again");
    let vm = builder().build().unwrap();
    let received = given_up.receive(&vm, &devices(), &mut || ControlFlow::Break(()));
    assert!(matches!(received.map(drop), Err(MigrateError::Cancelled)));
    drop(given_up);

    let arrival = destination.wait().unwrap().expect("a guest again");
    let (vm, devices) = (builder().build().unwrap(), devices());
    let prepared = arrival.receive(&vm, &devices, &mut || ControlFlow::Continue(()));
    let Arrived { vcpus, arriving } = arrival.start(prepared.unwrap()).unwrap();
    let pause = Pause::default();
    thread::scope(|scope| {
        scope.spawn(|| arrival.take_rest(arriving));
        scope.spawn(|| drop(run_pausable(vcpus, &devices, &*vm, &pause)));
        while arrival.handle().stage() != IncomingStage::Whole {
            thread::yield_now();
        }
        devices.end(Ending::Stopped, &*vm);
        arrival.handle().end(None);
    });
}

/// Sends the guest until it has moved. Returns why it stayed before.
fn send(guest: &Guest<'_, lacuna_soft::Vm>, to: &Address) -> Vec<String> {
    let mut reasons = Vec::new();
    loop {
        let connector = Connector::new(to.clone(), None).unwrap();
        let outgoing = Outgoing::new(connector, Plan::default());
        match outgoing.send(guest, &|_| ()) {
            Outcome::Moved(moved) => {
                assert!(moved.report.pages > 0, "{:?}", moved.report);
                return reasons;
            }
            Outcome::Stayed(Stayed::Failed(why)) => reasons.push(why.to_string()),
            _ => panic!("{reasons:?}"),
        }
    }
}

#[test]
fn a_destination_waits_again_after_a_failed_attempt() {
    if let Some(why) = lacuna_guest::unavailable() {
        lacuna_skip::skip_test(why);
    }
    let any = "tcp:127.0.0.1:0".parse().unwrap();
    let listener = Listener::open(&any, None, Arc::default()).unwrap();
    let destination = Destination::new(listener, |_| ());
    let image = lacuna_guest::image("verify").expect("a built-in guest");
    let image = Image::parse(image.file).unwrap();
    let (vm, devices, pause) = (builder().build().unwrap(), devices(), Pause::default());
    let line = format!("{} rounds=100000", builder().full_command_line());
    let vcpus = vm.boot(&image, &line).unwrap();
    let guest = Guest {
        vm: &*vm,
        devices: &devices,
        pause: &pause,
    };
    thread::scope(|scope| {
        scope.spawn(|| arrive(&destination));
        scope.spawn(|| drop(run_pausable(vcpus, &devices, &*vm, &pause)));
        while devices.status_page().is_none() && devices.ending().is_none() {
            thread::yield_now();
        }
        let reasons = send(&guest, destination.address());
        let [refused, given_up] = &reasons[..] else {
            panic!("{reasons:?}");
        };
        assert!(refused.contains("not today"), "{refused}");
        assert!(given_up.contains("refused"), "{given_up}");
    });
}
