//! Moves a guest to another VM while it runs. Both ends are in this process, and the connections
//! are TCP on this host. Each function does a VMM's work on one side.
//!
//!     cargo run --release --example migrate

use lacuna::migrate::stream::{Arrived, Connection, Connections, Incoming, Mode, Plan, Sent, send};
use lacuna::migrate::{Guest, MigrateError};
use lacuna::{
    Arch, Builder, Ending, Image, PageCount, Pause, PlatformDevices, Vm, run_pausable, soft,
};
use std::error::Error;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::ops::ControlFlow;
use std::thread;
use std::time::Duration;

type Done = Result<(), Box<dyn Error + Send + Sync>>;

/// The answer to each report of progress.
const CONTINUE: ControlFlow<()> = ControlFlow::Continue(());
/// A peer that is silent for this long counts as cut off.
const SILENCE: Duration = Duration::from_secs(30);
/// The time between two attempts to connect again.
const RETRY: Duration = Duration::from_secs(1);

/// The source makes connections.
struct Dial(SocketAddr);

/// The destination accepts them.
struct Accept(TcpListener);

impl Connections for Dial {
    fn open(&self) -> io::Result<Box<dyn Connection>> {
        patient(TcpStream::connect_timeout(&self.0, SILENCE)?)
    }
}

impl Connections for Accept {
    fn open(&self) -> io::Result<Box<dyn Connection>> {
        // A VMM waits here for a limited time.
        patient(self.0.accept()?.0)
    }
}

fn patient(stream: TcpStream) -> io::Result<Box<dyn Connection>> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(SILENCE))?;
    stream.set_write_timeout(Some(SILENCE))?;
    Ok(Box::new(stream))
}

fn main() -> Done {
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    let address = listener.local_addr()?;
    let destination = thread::spawn(move || destination(&Accept(listener)));
    source(&Dial(address))?;
    destination.join().expect("the destination does not panic")
}

fn builder() -> soft::VmBuilder {
    let memory = PageCount::from_bytes(64 << 20);
    soft::VmBuilder::new(memory, memory)
}

/// Runs a guest, and sends it away while it runs.
fn source(to: &dyn Connections) -> Done {
    let guest = lacuna_guest::image("verify").ok_or("no guests are built in")?;
    let image = Image::parse(guest.file)?;
    let builder = builder();
    let vm = builder.build()?;
    let devices = PlatformDevices::of(Arch::X86_64, |line: &str| println!("source: {line}"));
    let vcpus = vm.boot(&image, &builder.full_command_line())?;
    let pause = Pause::default();
    thread::scope(|scope| {
        scope.spawn(|| drop(run_pausable(vcpus, &devices, &*vm, &pause)));
        while devices.status_page().is_none() && devices.ending().is_none() {
            thread::yield_now();
        }
        let guest = Guest {
            vm: &*vm,
            devices: &devices,
            pause: &pause,
        };
        let plan = Plan {
            mode: Mode::Hybrid,
            ..Plan::default()
        };
        // After an error of `send` the guest keeps running here.
        let mut sent = send(&guest, to, &plan, &mut |_| CONTINUE)?;
        let outgoing = loop {
            match sent {
                Sent::Moved(outgoing) => break outgoing,
                // This process has pages that the guest needs. A VMM continues until a person says
                // that the destination has ended.
                Sent::Cut { outgoing, why } | Sent::Unknown { outgoing, why } => {
                    eprintln!("source: {why}; connecting again");
                    thread::sleep(RETRY);
                    sent = outgoing.resume(to, &mut |_| CONTINUE);
                }
            }
        };
        println!(
            "source: the guest has gone: {} pages with content in {} rounds",
            outgoing.pages(),
            outgoing.rounds().len()
        );
        // `outgoing` ends the run here when it is dropped.
        Ok(())
    })
}

/// Takes a guest, and runs it to its end.
fn destination(at: &dyn Connections) -> Done {
    let incoming = Incoming::accept(at)?;
    // A VMM makes the VM that `Incoming::machine` describes.
    let vm = soft::VmBuilder {
        source: incoming.page_source(),
        ..builder()
    }
    .build()?;
    let devices = PlatformDevices::of(Arch::X86_64, |line: &str| println!("destination: {line}"));
    let mut started = incoming
        .receive(at, &vm, &devices, &mut |_| CONTINUE)?
        .start();
    let Arrived { vcpus, arriving } = loop {
        match started {
            Ok(arrived) => break arrived,
            // The source may or may not have handed the guest over. It may connect again.
            Err(waiting) => started = waiting.resume(at),
        }
    };
    println!(
        "destination: the guest's downtime was {:?}, and {} pages arrive while it runs",
        arriving.downtime(),
        arriving.awaited().len()
    );
    thread::scope(|scope| {
        // This is dropped before the scope waits for the run, so that no vCPU waits for a page of
        // the source.
        let mut arriving = arriving;
        scope.spawn(|| drop(run_pausable(vcpus, &devices, &*vm, &Pause::default())));
        while let Err(why) = arriving.finish(&mut |_| CONTINUE) {
            if !matches!(why, MigrateError::Cut(_)) {
                // The guest runs until it needs a page that never arrives.
                return Err(why);
            }
            eprintln!("destination: {why}; waiting for the source");
            while arriving.resume(at).is_err() {}
        }
        Ok(())
    })?;
    match devices.ending() {
        Some(Ending::Exited(0)) => Ok(()),
        other => Err(format!("{other:?}").into()),
    }
}
