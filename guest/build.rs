//! Builds the guest images with the host's C compiler.
//!
//! ```text
//! kernel/*.c *.S, kernel/arch/ARCH/*.c *.S, user/format.c, memory.c   --> kernel objects, once
//! user/*.c *.S, user/arch/ARCH/*.c *.S                                --> library objects, once
//! workloads/*.c *.S, workloads/arch/ARCH/*.c *.S
//!                           --> NAME.program.elf --> .incbin --> NAME.elf
//! workloads/cpubench.* + native/shim.c      --> cpubench-native, for this machine itself
//! ```
//! `ARCH` is x86. The compiler's flags are in `kernel/arch/ARCH/cflags` and
//! `user/arch/ARCH/cflags`. `build-guest.sh` reads them too.
//!
//! A host may have no compiler for x86-64 guests. Then the build continues without images: each
//! file is empty, and `unavailable` has the reason for the crate's users.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, exit};

/// The architecture of the guests.
const ARCH: &str = "x86";
const LINK: [&str; 6] = [
    "-nostdlib",
    "-static",
    "-no-pie",
    "-Wl,--build-id=none",
    "-Wl,-z,max-page-size=4096",
    "-Wl,-z,noexecstack",
];

fn main() {
    for path in [
        "build.rs",
        "include",
        "kernel",
        "user",
        "workloads",
        "native",
    ] {
        println!("cargo:rerun-if-changed={path}");
    }
    println!("cargo:rerun-if-env-changed=LACUNA_GUEST_CC");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let build = Build {
        cc: env::var_os("LACUNA_GUEST_CC").unwrap_or("cc".into()),
        out,
    };
    let unavailable = build.unavailable();
    write(
        &build.out.join("unavailable"),
        unavailable.as_deref().unwrap_or_default(),
    );
    if let Some(reason) = unavailable {
        println!("cargo:warning=no guest images are built in: {reason}");
        for source in workloads() {
            write(&build.out.join(format!("{}.elf", stem(&source))), "");
        }
        write(&build.out.join("cpubench-native"), "");
        return;
    }

    let kernel = build.compile_all("kernel", &sources("kernel", &["program"]));
    let shared = ["user/format.c", "user/memory.c"].map(PathBuf::from);
    let kernel = [kernel, build.compile_all("kernel", &shared)].concat();
    let library = build.compile_all("user", &sources("user", &[]));
    for source in workloads() {
        build.image(&source, &kernel, &library);
    }
    build.native_cpubench();
}

/// The C file of each workload.
fn workloads() -> Vec<PathBuf> {
    let mut all = sources("workloads", &[]);
    all.retain(|p| p.extension().is_some_and(|e| e == "c"));
    all
}

/// C and assembly files of a folder and of its folder for the architecture, without the named ones.
/// They are sorted by name alone, so that a file's folder does not decide its place in the image.
fn sources(folder: &str, without: &[&str]) -> Vec<PathBuf> {
    let folders = [folder.to_owned(), format!("{folder}/arch/{ARCH}")];
    let mut files: Vec<PathBuf> = folders
        .iter()
        .flat_map(|folder| fs::read_dir(folder).unwrap_or_else(|e| fail(&format!("{folder}: {e}"))))
        .filter_map(|e| Some(e.ok()?.path()))
        .filter(|p| p.extension().is_some_and(|e| e == "c" || e == "S"))
        .filter(|p| !without.contains(&stem(p).as_str()))
        .collect();
    files.sort_by(|a, b| a.file_name().cmp(&b.file_name()));
    files
}

struct Build {
    cc: OsString,
    out: PathBuf,
}

impl Build {
    /// The reason if this host's compiler cannot build the guests.
    fn unavailable(&self) -> Option<String> {
        let help = "install a C compiler for x86-64 with its assembler and linker (Debian and \
                    Ubuntu: `apt install gcc`; Fedora: `dnf install gcc`; on another processor: \
                    `apt install gcc-x86-64-linux-gnu`), or name one in LACUNA_GUEST_CC (for \
                    example x86_64-linux-gnu-gcc), and build again";
        let machine = match Command::new(&self.cc).arg("-dumpmachine").output() {
            Ok(o) => String::from_utf8_lossy(&o.stdout).trim().to_string(),
            Err(e) => return Some(format!("cannot run {:?}: {e}; {help}", self.cc)),
        };
        let elf = machine.contains("linux") || machine.contains("elf");
        if machine.starts_with("x86_64") && elf {
            return None;
        }
        let cc = &self.cc;
        Some(format!(
            "{cc:?} compiles for {machine:?}, and the guests are x86-64 ELF files; {help}"
        ))
    }

    fn cc(&self, flags: &str) -> Command {
        let mut cc = Command::new(&self.cc);
        cc.arg(format!("@{flags}/arch/{ARCH}/cflags"));
        let folders = ["include", "kernel", "workloads"].map(Path::new);
        let arch = ["kernel", "user", "workloads"].map(|part| format!("{part}/arch/{ARCH}"));
        for folder in folders.iter().copied().chain(arch.iter().map(Path::new)) {
            cc.arg("-I").arg(folder);
        }
        cc
    }

    fn compile_all(&self, flags: &str, files: &[PathBuf]) -> Vec<PathBuf> {
        files.iter().map(|f| self.compile(flags, f, &[])).collect()
    }

    fn compile(&self, flags: &str, source: &Path, extra: &[String]) -> PathBuf {
        let ext = source
            .extension()
            .and_then(|e| e.to_str())
            .unwrap_or_default();
        let folder = source.parent().unwrap_or(source).display().to_string();
        let folder = folder.replace('/', "-");
        let object = self
            .out
            .join(format!("{flags}-{folder}-{}-{ext}.o", stem(source)));
        run(self
            .cc(flags)
            .args(extra)
            .arg("-c")
            .arg(source)
            .arg("-o")
            .arg(&object));
        object
    }

    /// The image of one workload: links its program, then the kernel around it.
    fn image(&self, source: &Path, kernel: &[PathBuf], library: &[PathBuf]) {
        let name = stem(source);
        let folder = self.out.join(format!("{name}.d"));
        fs::create_dir_all(&folder).unwrap_or_else(|e| fail(&format!("{folder:?}: {e}")));
        let parts = sources("workloads", &[]);
        let mut parts: Vec<PathBuf> = parts.into_iter().filter(|p| stem(p) == name).collect();
        parts.sort_by_key(|part| part != source);
        let objects = self.compile_all("user", &parts);
        let program = folder.join("program.elf");
        let mut link = self.cc("user");
        link.args(LINK)
            .arg(format!("-Tuser/arch/{ARCH}/user.ld"))
            .arg("-o")
            .arg(&program);
        run(link.args(objects).args(library));

        let include = format!("-Wa,-I{}", folder.display());
        let blob = self.compile("kernel", Path::new("kernel/program.S"), &[include]);
        let image = self.out.join(format!("{name}.elf"));
        let mut link = self.cc("kernel");
        link.args(LINK)
            .arg(format!("-Tkernel/arch/{ARCH}/kernel.ld"))
            .arg("-o")
            .arg(&image);
        run(link.args(kernel).arg(blob));
    }

    /// Links the same objects as in the guest with a C library in place of the guest kernel.
    fn native_cpubench(&self) {
        let to = self.out.join("cpubench-native");
        if env::var("HOST").ok() != env::var("TARGET").ok() || !cfg!(target_arch = "x86_64") {
            write(&to, "");
            return;
        }
        let rename = ["-Dmain=lacuna_main".to_string()];
        let code = ["workloads/cpubench.c", "workloads/arch/x86/cpubench.S"].map(Path::new);
        let objects = code.map(|f| self.compile("user", f, &rename));
        let mut link = Command::new(&self.cc);
        link.args(["-O2", "-Wall", "-Wextra", "-Werror", "-Iinclude", "-o"])
            .arg(&to);
        run(link.args(objects).args(["native/shim.c", "user/format.c"]));
    }
}

fn stem(path: &Path) -> String {
    path.file_stem()
        .map(|s| s.to_string_lossy().into_owned())
        .unwrap_or_default()
}

fn write(file: &Path, text: &str) {
    fs::write(file, text).unwrap_or_else(|e| fail(&format!("{file:?}: {e}")));
}

fn run(command: &mut Command) {
    match command.output() {
        Ok(o) if o.status.success() => {}
        Ok(o) => fail(&format!(
            "{command:?}\n{}",
            String::from_utf8_lossy(&o.stderr)
        )),
        Err(e) => fail(&format!("{command:?}: {e}")),
    }
}

fn fail(reason: &str) -> ! {
    eprintln!("lacuna-guest: {reason}");
    exit(1)
}
