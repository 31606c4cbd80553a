//! The structure of the page and of the pictures.

use super::example;
use lacuna_report::{Run, drawings, html, overview};

/// Each element is closed.
fn is_balanced(text: &str) -> bool {
    let names = [
        "section", "div", "details", "figure", "svg", "g", "ul", "li", "code", "b", "small",
    ];
    names.iter().all(|name| {
        let opened = [" ", ">"].map(|end| text.matches(&format!("<{name}{end}")).count());
        opened.iter().sum::<usize>() == text.matches(&format!("</{name}>")).count()
    })
}

#[test]
fn each_result_is_shown_with_its_numbers_and_command() {
    let run = example();
    let page = html(&run, None);
    for figure in &run.figures {
        let id = figure.id.replace('.', ".<wbr>").replace('_', "_<wbr>");
        assert!(page.contains(&format!("<code>{id}</code>")), "{id}");
        assert!(
            page.contains(&format!("<b>{}</b>", figure.quantity())),
            "{id}"
        );
    }
    for text in [
        "Some CPU, 2 cores, 1.0 GiB, Linux 6.18",
        "<dd>abcdef1</dd>",
        "Run <code>lacuna lab</code> for &lt;more&gt;.",
        "<li>by <code>lacuna lab apf</code></li>",
        "bar ≥ 1.80: <b class=\"verdict\">met</b>",
        "bar ≥ 95.0: <b class=\"missed\">missed</b>",
        "published 2.00 [1]",
        "<li>KVM Forum 2010</li>",
        "null 0.950 .. 1.04",
        "<b class=\"verdict\">simulated</b>",
        "<code>apf.kvm</code> was not measured: /dev/kvm does not exist",
        "Ended early: interrupted by SIGINT",
        "<h2>Other results</h2>",
        "aria-label=\"Curves: paging.exit_vs_queue.*vcpu\"",
    ] {
        assert!(page.contains(text), "{text}");
    }
    assert!(is_balanced(&page));
}

#[test]
fn the_page_needs_nothing_but_itself() {
    let page = html(&example(), Some(&example()));
    let page = page.replace("xmlns=\"http://www.w3.org/2000/svg\"", "");
    for text in ["http", "<script", "src=", "@import", "url(h", "NaN", "inf%"] {
        assert!(!page.contains(text), "{text}");
    }
}

#[test]
fn another_run_is_drawn_beside_it() {
    let (run, mut old) = (example(), example());
    old.name = "before".into();
    let first = &mut old.figures[0];
    (first.value, first.min, first.max) = (1.5, 1.4, 1.6);
    old.figures[1].id = "apf.only_there".into();
    let page = html(&run, Some(&old));
    let row = "◇ <b>1.50 x</b> <span>1.40 .. 1.60</span> <b>differs</b>";
    assert_eq!(page.matches(row).count(), 1, "only one system: no glance");
    assert!(page.contains("apf.<wbr>only_<wbr>there"));
    assert!(page.contains("1 of 6 figures differ"));
    assert!(is_balanced(&page));
}

#[test]
fn a_run_without_results_is_a_page() {
    let page = html(&Run::default(), None);
    assert!(page.contains("</main></body></html>") && is_balanced(&page));
}

#[test]
fn pictures_have_both_schemes() {
    let overview = overview(&example(), None);
    assert!(overview.contains("x86 async page faults, 2010") && overview.contains("1.96 x"));
    let all = drawings().into_iter().map(|(_, svg)| svg).chain([overview]);
    for svg in all {
        assert!(svg.starts_with("<svg xmlns=") && is_balanced(&svg), "{svg}");
        assert!(svg.contains("prefers-color-scheme:dark"));
    }
}
