//! Builds the guest images with the host's C compiler.
//!
//! ```text
//! kernel/*.c *.S, user/format.c, memory.c   --> kernel objects, once
//! user/*.c *.S                              --> library objects, once
//! workloads/*.c *.S                         --> NAME.program.elf --> .incbin --> NAME.elf
//! workloads/cpubench.* + native/shim.c      --> cpubench-native, for this machine itself
//! ```
//! The compiler's flags are in `kernel/cflags` and `user/cflags`, which `build-guest.sh` reads too.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, exit};

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
    build.check_compiler();

    let kernel = build.compile_all("kernel", &sources("kernel", &["program"]));
    let shared = ["user/format.c", "user/memory.c"].map(PathBuf::from);
    let kernel = [kernel, build.compile_all("kernel", &shared)].concat();
    let library = build.compile_all("user", &sources("user", &[]));
    for source in sources("workloads", &[]) {
        if source.extension().is_some_and(|e| e == "c") {
            build.image(&source, &kernel, &library);
        }
    }
    build.native_cpubench();
}

/// C and assembly files of a folder, sorted, without the named ones.
fn sources(folder: &str, without: &[&str]) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap_or_else(|e| fail(&format!("{folder}: {e}")));
    let mut files: Vec<PathBuf> = entries
        .filter_map(|e| Some(e.ok()?.path()))
        .filter(|p| p.extension().is_some_and(|e| e == "c" || e == "S"))
        .filter(|p| !without.contains(&stem(p).as_str()))
        .collect();
    files.sort();
    files
}

struct Build {
    cc: OsString,
    out: PathBuf,
}

impl Build {
    fn check_compiler(&self) {
        let help = "install a C compiler for x86-64 with its assembler and linker (Debian and \
                    Ubuntu: `apt install gcc`; Fedora: `dnf install gcc`), or name one in \
                    LACUNA_GUEST_CC (for example x86_64-linux-gnu-gcc)";
        let found = Command::new(&self.cc).arg("-dumpmachine").output();
        let machine = match &found {
            Ok(o) => String::from_utf8_lossy(&o.stdout).trim().to_string(),
            Err(e) => fail(&format!(
                "cannot run {:?}: {e}. To build the guest: {help}",
                self.cc
            )),
        };
        if !machine.starts_with("x86_64") {
            fail(&format!(
                "{:?} compiles for {machine:?}, the guest is x86-64: {help}",
                self.cc
            ));
        }
    }

    fn cc(&self, flags: &str) -> Command {
        let mut cc = Command::new(&self.cc);
        cc.arg(format!("@{flags}/cflags")).arg("-Iinclude");
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
        let folder = source.parent().map(stem).unwrap_or_default();
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
        let mut parts = vec![source.to_path_buf(), source.with_extension("S")];
        parts.retain(|p| p.exists());
        let objects = self.compile_all("user", &parts);
        let program = folder.join("program.elf");
        let mut link = self.cc("user");
        link.args(LINK)
            .args(["-T", "user/user.ld", "-o"])
            .arg(&program);
        run(link.args(objects).args(library));

        let include = format!("-Wa,-I{}", folder.display());
        let blob = self.compile("kernel", Path::new("kernel/program.S"), &[include]);
        let image = self.out.join(format!("{name}.elf"));
        let mut link = self.cc("kernel");
        link.args(LINK)
            .args(["-T", "kernel/kernel.ld", "-o"])
            .arg(&image);
        run(link.args(kernel).arg(blob));
    }

    /// Links the same objects as in the guest with a C library in place of the guest kernel.
    fn native_cpubench(&self) {
        let to = self.out.join("cpubench-native");
        if env::var("HOST").ok() != env::var("TARGET").ok() || !cfg!(target_arch = "x86_64") {
            fs::write(&to, []).unwrap_or_else(|e| fail(&format!("{to:?}: {e}")));
            return;
        }
        let rename = ["-Dmain=lacuna_main".to_string()];
        let code = ["workloads/cpubench.c", "workloads/cpubench.S"].map(Path::new);
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
