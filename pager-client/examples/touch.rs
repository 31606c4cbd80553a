//! A VMM without a guest: it touches each page of a pager's image, and prints what it found.
//!
//!     lacuna pager --socket /tmp/pager.socket --from file:MEMORY &
//!     cargo run --release -p lacuna-pager-client --example touch /tmp/pager.socket
//!
//! Run two at once, and `grep Pss: /proc/PID/smaps_rollup` shows that they share the pages.

use lacuna_pager_client::{Accesses, Client};
use std::error::Error;
use std::time::Instant;

const PAGE: u64 = 4096;

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).ok_or("usage: touch SOCKET")?;
    let client = Client::connect(path.as_ref())?;
    // A VMM with vCPUs of KVM needs `Accesses::All`.
    let memory = client.memory(Accesses::User, |reason| {
        eprintln!("{reason}: this VM ends");
        std::process::exit(1);
    })?;

    let pages = memory.range().pages();
    let (begin, mut zeros) = (Instant::now(), 0);
    for page in 0..pages {
        let mut content = [0; PAGE as usize];
        memory.read(page * PAGE, &mut content);
        zeros += u64::from(content == [0; PAGE as usize]);
    }
    let time = begin.elapsed();
    println!("{pages} pages in {time:?}, {zeros} of them have zeros alone");

    // A write copies its page, and a removal leaves zeros: no other VM sees them.
    memory.write(0, b"written");
    memory.discard(pages - 1, 1)?;
    let mut byte = [1];
    memory.read((pages - 1) * PAGE, &mut byte);
    println!("the last page was taken away, and now has {}", byte[0]);

    println!(
        "process {} keeps the memory until Enter",
        std::process::id()
    );
    std::io::stdin().read_line(&mut String::new())?;
    Ok(())
}
