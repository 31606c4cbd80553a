//! Moves a guest to another VM while it runs. Both sides are in this process, and connect by TCP.
//!
//!     cargo run --release --example migrate

use lacuna::migrate::session::{Destination, Outcome, Outgoing};
use lacuna::migrate::stream::{Arrived, Mode};
use lacuna::migrate::transport::{Address, Connector, Listener};
use lacuna::{Arch, Builder, Image, PageCount, Pause, PlatformDevices, Vm, run_pausable, soft};
use std::{error::Error, ops::ControlFlow, thread};

type Done = Result<(), Box<dyn Error + Send + Sync>>;

fn main() -> Done {
    let listener = Listener::open(&"tcp:127.0.0.1:0".parse()?, None, Default::default())?;
    // A VMM shows the events: refused strangers, a cut connection.
    let destination = Destination::new(listener, |_| ());
    let address = destination.address().clone();
    let arriving = thread::spawn(move || run_arriving(&destination));
    run_and_send(address)?;
    arriving.join().expect("the destination does not panic")
}

fn builder() -> soft::VmBuilder {
    let memory = PageCount::from_bytes(64 << 20);
    soft::VmBuilder::new(memory, memory)
}

/// Runs a guest, and sends it away while it runs.
fn run_and_send(to: Address) -> Done {
    let guest = lacuna_guest::image("verify").ok_or("no guests are built in")?;
    let (builder, image) = (builder(), Image::parse(guest.file)?);
    let (vm, pause) = (builder.build()?, Pause::default());
    let devices = PlatformDevices::of(Arch::X86_64, |line: &str| println!("source: {line}"));
    let vcpus = vm.boot(&image, &builder.full_command_line())?;
    let (vm, devices, pause) = (&*vm, &devices, &pause);
    thread::scope(|scope| {
        scope.spawn(|| drop(run_pausable(vcpus, devices, vm, pause)));
        while devices.status_page().is_none() && devices.ending().is_none() {
            thread::yield_now();
        }
        let guest = lacuna::migrate::Guest { vm, devices, pause };
        let outgoing = Outgoing::new(Connector::new(to, None)?, Mode::Hybrid.into());
        match outgoing.send(&guest, &|_| ()) {
            Outcome::Moved(moved) => println!("source: the guest has gone: {:?}", moved.report),
            Outcome::Stayed(why) => return Err(why.into()),
            _ => return Err("its run was ended, or a person must decide".into()),
        }
        Ok(())
    })
}

/// Takes a guest, and runs it to its end.
fn run_arriving(destination: &Destination) -> Done {
    let arrival = destination.wait()?.expect("nothing ends the wait");
    // A VMM makes the VM that `Arrival::machine` describes.
    let mut builder = builder();
    builder.source = arrival.page_source();
    let vm = builder.build()?;
    let devices = PlatformDevices::of(Arch::X86_64, |line: &str| println!("destination: {line}"));
    let prepared = arrival.receive(&vm, &devices, &mut || ControlFlow::Continue(()))?;
    let Arrived { vcpus, arriving } = arrival.start(prepared)?;
    thread::scope(|scope| {
        scope.spawn(|| arrival.take_rest(arriving));
        drop(run_pausable(vcpus, &devices, &*vm, &Pause::default()));
        arrival.handle().end(None);
    });
    println!("destination: the guest has ended: {:?}", devices.ending());
    Ok(())
}
