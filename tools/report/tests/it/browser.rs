//! The report in headless Chromium, at the width of a phone.

use super::example;
use std::fs;
use std::process::Command;

/// Measures the page in a frame of 360 pixels, and beside it a page with both mistakes.
const FRAMES: &str = r#"<!doctype html><meta charset="utf-8">
<iframe id="page" width="360" height="800" src="page.html"></iframe>
<iframe id="wrong" width="360" height="800" srcdoc="<div style='width:500px'>w</div>"></iframe>
<pre id="found"></pre>
<script>
const width = frame => frame.contentDocument.documentElement.scrollWidth;
onload = () => {
  const inner = page.contentDocument;
  inner.querySelectorAll("details").forEach(details => details.open = true);
  const background = getComputedStyle(inner.body).backgroundColor;
  found.textContent = `page ${width(page)} wrong ${width(wrong)} background ${background}`;
  console.error("the only error");
};
</script>"#;

/// A browser that is installed.
fn browser() -> &'static str {
    let names = ["chromium", "chromium-browser", "google-chrome"];
    let found = names
        .into_iter()
        .find(|name| Command::new(name).arg("--version").output().is_ok());
    found.unwrap_or_else(|| lacuna_skip::skip_test("Chromium is not installed"))
}

/// The document after its scripts, and what the console got.
fn shown(frames: &std::path::Path, dark: bool) -> (String, String) {
    let profile = tempfile::tempdir().unwrap();
    let scheme = if dark { 0 } else { 1 };
    let output = Command::new(browser())
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
        ])
        // A file may read another in its frame only with this.
        .args([
            "--allow-file-access-from-files",
            "--enable-logging=stderr",
            "--dump-dom",
        ])
        .arg(format!("--blink-settings=preferredColorScheme={scheme}"))
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .arg(format!("file://{}", frames.display()))
        .output()
        .unwrap();
    let [document, log] = [output.stdout, output.stderr].map(|out| String::from_utf8(out).unwrap());
    (document, log)
}

#[lacuna_skip::test]
fn a_phone_shows_it_without_a_scroll_bar_and_without_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let page = lacuna_report::html(&example(), Some(&example()));
    fs::write(folder.path().join("page.html"), page).unwrap();
    let frames = folder.path().join("frames.html");
    fs::write(&frames, FRAMES).unwrap();
    for (dark, background) in [(false, "rgb(255, 255, 255)"), (true, "rgb(13, 17, 23)")] {
        let (document, log) = shown(&frames, dark);
        let expected = format!("page 360 wrong 508 background {background}");
        assert!(document.contains(&expected), "{document}\n{log}");
        let errors: Vec<&str> = log
            .lines()
            .filter(|line| line.contains("CONSOLE"))
            .collect();
        assert_eq!(errors.len(), 1, "{errors:?}");
        assert!(errors[0].contains("the only error"), "{errors:?}");
    }
}
