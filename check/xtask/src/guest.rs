//! `cargo xtask guest`: builds the AArch64 guest images. They are committed, because few machines
//! have the cross compiler.
//!
//! ```text
//! guest/ (C sources) ─► guest/build-guest.sh --arch arm64, once for each workload
//!                    ─► guest/images/arm64/NAME.Image
//!                    ─► guest/images/arm64/images.txt: compiler, linker, sources, each image
//! ```
//! `--check` writes nothing. It compares the sources and the images with the record, and builds
//! again if the recorded compiler is installed. Hashes are FNV-1a: they find a forgotten step, not
//! an attack.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Mutex;
use std::{env, fs, io, thread};

use crate::compare::{Failure, failure};

const USAGE: &str = "\
usage: cargo xtask guest          build the AArch64 guest images, and write them to guest/images
       cargo xtask guest --check  build nothing that is committed: compare";

/// The name of the record, beside the images.
const RECORD: &str = "images.txt";
const HEAD: &str = "# Written by `cargo xtask guest`. Flags: guest/kernel/arch/arm64/cflags, \
                    guest/user/arch/arm64/cflags.\n";

/// Carries out `cargo xtask guest` with `arguments`.
///
/// The exit code is 0 if all is well, 1 if the images do not match, 2 for wrong arguments, and 3 if
/// they cannot be built here.
pub fn run(arguments: &[String]) -> ExitCode {
    let guest = Guest::of_workspace();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match arguments[..] {
        [] => guest.write().map(|()| true),
        ["--check"] => guest.check(),
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(why) => {
            eprintln!("xtask guest: {why}");
            ExitCode::from(3)
        }
    }
}

/// The folder of the guest's sources and images.
struct Guest {
    folder: PathBuf,
}

/// Images by name.
type Images = BTreeMap<String, Vec<u8>>;

/// The tools that made the images.
#[derive(Debug, PartialEq, Eq)]
struct Tools {
    compiler: String,
    linker: String,
}

impl Guest {
    fn of_workspace() -> Self {
        Self {
            folder: Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guest"),
        }
    }

    fn images_folder(&self) -> PathBuf {
        self.folder.join("images/arm64")
    }

    /// The files that determine the images, by their path in the guest's folder.
    fn sources(&self) -> io::Result<Vec<String>> {
        let mut found = vec!["build-guest.sh".to_owned()];
        for part in ["include", "include/lacuna", "include/lacuna/arch"] {
            found.extend(self.files_of(part)?);
        }
        for part in ["kernel", "user", "workloads"] {
            found.extend(self.files_of(part)?);
            found.extend(self.files_of(&format!("{part}/arch/arm64"))?);
        }
        found.sort();
        Ok(found)
    }

    fn files_of(&self, part: &str) -> io::Result<Vec<String>> {
        let mut files = Vec::new();
        for entry in fs::read_dir(self.folder.join(part))? {
            let entry = entry?;
            if entry.file_type()?.is_file() {
                files.push(format!("{part}/{}", entry.file_name().to_string_lossy()));
            }
        }
        Ok(files)
    }

    fn hash_of_sources(&self) -> io::Result<u64> {
        let mut hash = Hash::new();
        for file in self.sources()? {
            let bytes = fs::read(self.folder.join(&file))?;
            hash.add(file.as_bytes());
            hash.add(&(bytes.len() as u64).to_le_bytes());
            hash.add(&bytes);
        }
        Ok(hash.0)
    }

    /// Each workload's name, with its C file and then its assembly, if it has any.
    fn workloads(&self) -> io::Result<Vec<(String, Vec<String>)>> {
        let mut files = self.files_of("workloads")?;
        files.extend(self.files_of("workloads/arch/arm64")?);
        let stem = |file: &str| Some(Path::new(file).file_stem()?.to_string_lossy().into_owned());
        let code = |file: &&String| file.ends_with(".c") || file.ends_with(".S");
        let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for file in files.iter().filter(code) {
            if let Some(name) = stem(file) {
                found.entry(name).or_default().push(file.clone());
            }
        }
        for files in found.values_mut() {
            files.sort_by_key(|file| !file.ends_with(".c"));
        }
        Ok(found.into_iter().collect())
    }

    fn tools() -> Result<Tools, Failure> {
        let compiler = compiler();
        let help = "install it (Debian and Ubuntu: `apt install gcc-aarch64-linux-gnu`), or name \
                    one in LACUNA_GUEST_CC_ARM64";
        let first_line = |command: &mut Command| match command.output() {
            Ok(out) if out.status.success() => {
                let text = String::from_utf8_lossy(&out.stdout).into_owned();
                Ok(text.lines().next().unwrap_or_default().to_owned())
            }
            Ok(out) => failure(format!("{command:?} ends with {}", out.status)),
            Err(error) => failure(format!("cannot run {command:?}: {error}; {help}")),
        };
        let linker = first_line(Command::new(&compiler).arg("-print-prog-name=ld"))?;
        Ok(Tools {
            compiler: first_line(Command::new(&compiler).arg("--version"))?,
            linker: first_line(Command::new(linker).arg("--version"))?,
        })
    }

    /// Builds every image, several at a time.
    fn build(&self) -> Result<Images, Failure> {
        let out = env::temp_dir().join(format!("lacuna-guest-{}", std::process::id()));
        fs::create_dir_all(&out).or_else(|e| failure(format!("{}: {e}", out.display())))?;
        let mut workloads = self.workloads().or_else(failure)?;
        let mut images = Images::new();
        // The first one compiles the common objects, before the others look for them.
        if let Some((name, sources)) = workloads.pop() {
            let image = self.build_one(&out, &name, &sources)?;
            images.insert(name, image);
        }
        let (rest, built) = (Mutex::new(workloads), Mutex::new(Ok(images)));
        let threads = thread::available_parallelism().map_or(1, usize::from);
        thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    while let Some((name, sources)) = rest.lock().expect("no panic").pop() {
                        let image = self.build_one(&out, &name, &sources);
                        let mut built = built.lock().expect("no panic");
                        match (&mut *built, image) {
                            (Ok(images), Ok(image)) => drop(images.insert(name, image)),
                            (Err(_), _) => return,
                            (_, Err(why)) => *built = Err(why),
                        }
                    }
                });
            }
        });
        let _ = fs::remove_dir_all(&out);
        built.into_inner().expect("no panic")
    }

    fn build_one(&self, out: &Path, name: &str, sources: &[String]) -> Result<Vec<u8>, Failure> {
        let to = out.join(format!("{name}.Image"));
        let mut command = Command::new("sh");
        command
            .env("LACUNA_GUEST_OBJECTS", out)
            .arg(self.folder.join("build-guest.sh"))
            .args(["--arch", "arm64", "-o"])
            .arg(&to)
            .args(sources.iter().map(|source| self.folder.join(source)));
        let out = command
            .output()
            .or_else(|e| failure(format!("{command:?}: {e}")))?;
        if !out.status.success() {
            return failure(format!(
                "{command:?}\n{}",
                String::from_utf8_lossy(&out.stderr)
            ));
        }
        fs::read(&to).or_else(|e| failure(format!("{}: {e}", to.display())))
    }

    /// The text of the record.
    fn record(&self, tools: &Tools, images: &Images) -> io::Result<String> {
        let mut text = HEAD.to_owned();
        let _ = writeln!(text, "compiler = {}", tools.compiler);
        let _ = writeln!(text, "linker = {}", tools.linker);
        let _ = writeln!(text, "sources = {:016x}", self.hash_of_sources()?);
        for (name, bytes) in images {
            let mut hash = Hash::new();
            hash.add(bytes);
            let _ = writeln!(text, "{name}.Image = {} {:016x}", bytes.len(), hash.0);
        }
        Ok(text)
    }

    fn write(&self) -> Result<(), Failure> {
        let tools = Self::tools()?;
        let images = self.build()?;
        let folder = self.images_folder();
        let write = || -> io::Result<()> {
            if folder.exists() {
                fs::remove_dir_all(&folder)?;
            }
            fs::create_dir_all(&folder)?;
            for (name, bytes) in &images {
                fs::write(folder.join(format!("{name}.Image")), bytes)?;
            }
            fs::write(folder.join(RECORD), self.record(&tools, &images)?)
        };
        write().or_else(|e| failure(format!("{}: {e}", folder.display())))?;
        println!("{} images, by {}", images.len(), tools.compiler);
        Ok(())
    }

    /// The images in their folder.
    fn committed(&self) -> io::Result<Images> {
        let mut images = Images::new();
        for entry in fs::read_dir(self.images_folder())? {
            let path = entry?.path();
            if path.extension().is_some_and(|e| e == "Image") {
                let name = path.file_stem().unwrap_or_default().to_string_lossy();
                images.insert(name.into_owned(), fs::read(&path)?);
            }
        }
        Ok(images)
    }

    fn recorded(&self) -> io::Result<String> {
        fs::read_to_string(self.images_folder().join(RECORD))
    }

    fn recorded_tools(record: &str) -> Tools {
        let value = |name: &str| {
            let mut lines = record.lines();
            let line = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(" = "));
            line.unwrap_or_default().to_owned()
        };
        Tools {
            compiler: value("compiler"),
            linker: value("linker"),
        }
    }

    /// The record made from the committed images and the present sources. If it differs from the
    /// committed record, an image was not built again after a change.
    fn record_of_committed(&self) -> io::Result<(String, String)> {
        let recorded = self.recorded()?;
        let found = self.record(&Self::recorded_tools(&recorded), &self.committed()?)?;
        Ok((recorded, found))
    }

    /// The names of the images that a build here changes. `Err` has the reason why this machine
    /// cannot build them.
    fn differences(&self) -> Result<Vec<String>, Failure> {
        let recorded = Self::recorded_tools(&self.recorded().or_else(failure)?);
        let here = Self::tools()?;
        if here != recorded {
            return failure(format!(
                "this compiler is {:?} with {:?}; the images are by {:?} with {:?}",
                here.compiler, here.linker, recorded.compiler, recorded.linker
            ));
        }
        let (built, committed) = (self.build()?, self.committed().or_else(failure)?);
        let mut names: Vec<String> = built.keys().chain(committed.keys()).cloned().collect();
        names.sort();
        names.dedup();
        names.retain(|name| built.get(name) != committed.get(name));
        Ok(names)
    }

    fn check(&self) -> Result<bool, Failure> {
        let (recorded, found) = self.record_of_committed().or_else(failure)?;
        if recorded != found {
            eprintln!("{}", stale(&recorded, &found));
            return Ok(false);
        }
        let differ = self.differences()?;
        for name in &differ {
            eprintln!("guest/images/arm64/{name}.Image: a build here has other bytes");
        }
        if differ.is_empty() {
            println!("all images are as their sources make them");
        }
        Ok(differ.is_empty())
    }
}

fn compiler() -> String {
    env::var("LACUNA_GUEST_CC_ARM64").unwrap_or_else(|_| "aarch64-linux-gnu-gcc".to_owned())
}

fn stale(recorded: &str, found: &str) -> String {
    let lines = found.lines().filter(|line| !recorded.contains(line));
    format!(
        "guest/images/arm64 does not match its sources: run `cargo xtask guest` with {:?}, and \
         commit the result. Not as recorded:\n{}",
        Guest::recorded_tools(recorded).compiler,
        lines.collect::<Vec<_>>().join("\n")
    )
}

/// FNV-1a, 64 bits.
struct Hash(u64);

impl Hash {
    fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_committed_images_are_of_these_sources() {
        let guest = Guest::of_workspace();
        let (recorded, found) = guest.record_of_committed().unwrap();
        assert!(recorded == found, "{}", stale(&recorded, &found));
        let names = guest.workloads().unwrap().into_iter().map(|(name, _)| name);
        let committed = guest.committed().unwrap();
        assert!(names.eq(committed.keys().cloned()), "one image each");
    }

    #[test]
    fn the_recorded_compiler_makes_the_same_bytes() {
        match Guest::of_workspace().differences() {
            Ok(differ) => assert_eq!(differ, Vec::<String>::new()),
            Err(why) => lacuna_skip::skip(why.to_string()),
        }
    }

    #[test]
    fn a_change_is_found() {
        let hash = |bytes: &[u8]| {
            let mut hash = Hash::new();
            hash.add(bytes);
            hash.0
        };
        assert_eq!(
            hash(b"a"),
            0xaf63_dc4c_8601_ec8c,
            "the published test vector"
        );
        assert_ne!(hash(b"ab"), hash(b"ba"));
        let record = "compiler = x 1\nlinker = y 2\nsources = 1\n";
        assert_eq!(Guest::recorded_tools(record).compiler, "x 1");
        assert!(stale(record, "compiler = x 1\nsources = 2\n").ends_with("\nsources = 2"));
    }
}
