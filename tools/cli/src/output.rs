//! Where a result goes: text for people on stdout, JSON where it was asked for.

use std::io::{self, Write};
use std::path::PathBuf;

use crate::args::{JsonTarget, Output};

/// A result that could not be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {}: {source}", path.display())]
pub struct WriteError {
    path: PathBuf,
    source: io::Error,
}

/// Tells a result as `output` asks: with `--json -`, stdout carries the JSON and nothing else.
///
/// # Errors
/// When the JSON file cannot be written.
pub fn tell(output: &Output, text: &str, json: &str) -> Result<(), WriteError> {
    match &output.json {
        Some(JsonTarget::Stdout) => print(json),
        Some(JsonTarget::File(path)) => {
            print(text);
            let error = |source| WriteError {
                path: path.clone(),
                source,
            };
            std::fs::write(path, json).map_err(error)?;
        }
        None => print(text),
    }
    Ok(())
}

/// Prints to stdout. That nobody listens any more (`lacuna doctor | head -1`) is no error.
pub fn print(text: &str) {
    let mut stdout = io::stdout().lock();
    let _ = stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_gets_the_json_and_a_bad_path_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.json");
        let to = |path| Output {
            json: Some(JsonTarget::File(path)),
            quiet: false,
        };
        tell(&to(path.clone()), "", "{}\n").unwrap();
        assert_eq!(std::fs::read_to_string(path).unwrap(), "{}\n");
        let error = tell(&to("/nonexistent/out.json".into()), "", "{}\n").unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("cannot write /nonexistent/out.json: No such file")
        );
    }
}
