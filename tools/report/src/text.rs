//! Escaped and formatted text.

/// At least three significant digits and never an exponent, because readers compare figures by eye;
/// `none` for an infinite value.
pub fn digits(value: f64) -> String {
    if !value.is_finite() {
        return "none".into();
    }
    let decimals = match value.abs() {
        size if size >= 100.0 => 0,
        size if size >= 10.0 => 1,
        size if size >= 1.0 || size == 0.0 => 2,
        _ => 3,
    };
    format!("{value:.decimals$}")
}

/// `low .. high`.
pub(crate) fn range((low, high): (f64, f64)) -> String {
    format!("{} .. {}", digits(low), digits(high))
}

/// `text` without characters that HTML and XML read as markup.
pub(crate) fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c => out.push(c),
        }
    }
    out
}

/// An id that may be broken at its dots and underscores.
pub(crate) fn breakable(id: &str) -> String {
    escaped(id).replace('.', ".<wbr>").replace('_', "_<wbr>")
}

/// Escaped `text`, in which the words between backquotes are code.
pub(crate) fn with_code(text: &str) -> String {
    let parts = escaped(text);
    let mut out = String::new();
    for (index, part) in parts.split('`').enumerate() {
        match index % 2 {
            0 => out.push_str(part),
            _ => out.push_str(&format!("<code>{part}</code>")),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_three_digits() {
        let figures = [0.0, 0.384, 1.0, 19.951, 840.4, 12345.6, -3.256].map(digits);
        assert_eq!(
            figures,
            ["0.00", "0.384", "1.00", "20.0", "840", "12346", "-3.26"]
        );
    }

    #[test]
    fn markup_is_escaped() {
        assert_eq!(escaped("a<b> & \"c\""), "a&lt;b&gt; &amp; &quot;c&quot;");
        assert_eq!(with_code("run `a<b`."), "run <code>a&lt;b</code>.");
    }
}
