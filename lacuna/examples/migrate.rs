//! Moves a guest to another VM while it runs. Both sides are in this process, and connect by TCP.
//!
//!     cargo run --release --example migrate

use lacuna::migrate::session::{Destination, Outcome, Outgoing};
use lacuna::migrate::stream::Mode;
use lacuna::migrate::transport::{Address, Connector, Listener};
use lacuna::{Builder, Image, Machine, PageCount, PlatformDevices, soft};
use std::{error::Error, ops::ControlFlow, thread, time::Duration};

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
    let devices = PlatformDevices::new(|line: &str| println!("source: {line}"));
    let guest = builder().start(&Image::parse(guest.file)?, devices)?;
    while guest.devices().status_page().is_none() && !guest.wait_timeout(Duration::ZERO) {
        thread::yield_now();
    }
    let outgoing = Outgoing::new(Connector::new(to, None)?, Mode::Hybrid.into());
    match outgoing.send(&guest, &|_| ()) {
        Outcome::Moved(moved) => println!("source: the guest has gone: {:?}", moved.report),
        Outcome::Stayed(why) => return Err(why.into()),
        _ => return Err("its run was ended, or a person must decide".into()),
    }
    Ok(())
}

/// Takes a guest, and runs it to its end.
fn run_arriving(destination: &Destination) -> Done {
    let arrival = destination.wait()?.expect("nothing ends the wait");
    // A VMM makes the VM that `Arrival::machine` describes.
    let mut builder = builder();
    builder.source = arrival.page_source();
    let devices = PlatformDevices::new(|line: &str| println!("destination: {line}"));
    let machine = Machine::new(builder.build()?, devices)?;
    let end = arrival.run(machine, &mut || ControlFlow::Continue(()), |_| ())?;
    println!("destination: {}", end.ending);
    Ok(())
}
