//! `lacuna manual`: the man pages and the shells' completions, for packages and installations.
//!
//! Both are generated from the command line's definition, so they are as complete as `--help`.

use crate::args::{Cli, ManualArgs};
use crate::exit::Exit;
use crate::run::exit_of;
use clap::CommandFactory;
use clap_complete::Shell;
use std::fs;
use std::io;
use std::path::Path;

/// The folder of each shell's completions, below a `share` folder.
const COMPLETIONS: [(Shell, &str); 3] = [
    (Shell::Bash, "bash-completion/completions"),
    (Shell::Fish, "fish/vendor_completions.d"),
    (Shell::Zsh, "zsh/site-functions"),
];

/// Writes the files below the folder of `args`.
pub fn manual(args: &ManualArgs) -> Exit {
    let written = write(&args.folder).map(|()| Exit::Done);
    exit_of(written.map_err(|error| {
        let folder = args.folder.display();
        let text = format!(
            "cannot write the manual below {folder}: {error}; name a folder that this user can \
             write to, such as ~/.local/share"
        );
        (Exit::Host, text)
    }))
}

fn write(share: &Path) -> io::Result<()> {
    let pages = share.join("man/man1");
    fs::create_dir_all(&pages)?;
    clap_mangen::generate_to(Cli::command(), &pages)?;
    for (shell, folder) in COMPLETIONS {
        let folder = share.join(folder);
        fs::create_dir_all(&folder)?;
        clap_complete::generate_to(shell, &mut Cli::command(), "lacuna", &folder)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Command;

    /// Whether `folder` has a page with each option of `command`, and of each command below it.
    fn check(folder: &Path, name: &str, command: &Command) {
        let page = fs::read_to_string(folder.join(format!("{name}.1"))).expect(name);
        for option in command.get_arguments().filter(|arg| !arg.is_hide_set()) {
            if let Some(long) = option.get_long() {
                let long = long.replace('-', "\\-");
                assert!(page.contains(&format!("\\-\\-{long}")), "{name} {long}");
            }
        }
        for command in command.get_subcommands().filter(|c| !c.is_hide_set()) {
            check(folder, &format!("{name}-{}", command.get_name()), command);
        }
    }

    #[test]
    fn every_command_has_a_page_and_every_shell_its_completions() {
        let share = tempfile::tempdir().unwrap();
        write(share.path()).unwrap();
        check(&share.path().join("man/man1"), "lacuna", &Cli::command());
        for (folder, file) in [
            ("bash-completion/completions", "lacuna.bash"),
            ("fish/vendor_completions.d", "lacuna.fish"),
            ("zsh/site-functions", "_lacuna"),
        ] {
            let path = share.path().join(folder).join(file);
            let text = fs::read_to_string(path).expect(file);
            assert!(text.contains("exit-on-missing"), "{file}");
        }
    }
}
