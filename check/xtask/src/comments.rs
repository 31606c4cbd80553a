//! The comments of a Rust, C or assembler file, line by line.
//!
//! The lexer of `proc_macro2` drops comments, so this module has its own small lexer. It skips
//! strings, raw strings and character literals, which can contain the mark of a comment.

/// A comment's text on one line.
#[derive(PartialEq, Eq, Debug)]
pub struct Comment<'a> {
    /// Line, counted from one.
    pub line: usize,
    /// The text behind the marker on this line.
    pub text: &'a str,
}

/// The comments of `text`, in order. A block comment has one entry for each of its lines.
pub fn of(text: &str) -> Vec<Comment<'_>> {
    let mut found = Vec::new();
    let (mut at, mut line) = (0, 1);
    while at < text.len() {
        let rest = &text[at..];
        let skipped = if rest.starts_with("//") {
            let length = rest.find('\n').unwrap_or(rest.len());
            found.push(Comment {
                line,
                text: &rest[2..length],
            });
            length
        } else if let Some(body) = rest.strip_prefix("/*") {
            let length = body.find("*/").map_or(rest.len(), |end| end + 4);
            let lines = (line..).zip(rest[..length].lines());
            found.extend(lines.map(|(line, text)| Comment { line, text }));
            length
        } else {
            literal(text, at)
        };
        line += rest[..skipped].matches('\n').count();
        at += skipped;
    }
    found
}

/// Length of the literal that starts at `at`, or of the one character there.
fn literal(text: &str, at: usize) -> usize {
    let rest = &text[at..];
    let one = rest.chars().next().map_or(1, char::len_utf8);
    let in_word = text[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
    match rest.as_bytes()[0] {
        b'"' => 1 + until(&rest[1..], '"'),
        b'r' if !in_word || text[..at].ends_with('b') => raw_string(rest).unwrap_or(one),
        b'\'' if rest[1..].starts_with('\\') => 1 + until(&rest[1..], '\''),
        b'\'' => {
            let inner = rest[1..].chars().next().map_or(0, char::len_utf8);
            let closed = rest[1 + inner..].starts_with('\'');
            if closed { inner + 2 } else { one }
        }
        _ => one,
    }
}

/// Bytes up to and including the first unescaped `quote`.
fn until(text: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, char) in text.char_indices() {
        if char == quote && !escaped {
            return at + 1;
        }
        escaped = char == '\\' && !escaped;
    }
    text.len()
}

/// Length of a raw string that starts with its `r`.
fn raw_string(text: &str) -> Option<usize> {
    let hashes = text[1..].bytes().take_while(|byte| *byte == b'#').count();
    let body = text[1 + hashes..].strip_prefix('"')?;
    let end = format!("\"{}", "#".repeat(hashes));
    let length = body.find(&end).map_or(body.len(), |at| at + end.len());
    Some(2 + hashes + length)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<(usize, &str)> {
        of(text).iter().map(|c| (c.line, c.text.trim())).collect()
    }

    #[test]
    fn line_and_block_comments_are_found() {
        let text = "//! head\nlet a = 1; // tail\n/* one\n * two */ b /* three */\n/// doc";
        let expected = [
            (1, "! head"),
            (2, "tail"),
            (3, "/* one"),
            (4, "* two */"),
            (4, "/* three */"),
            (5, "/ doc"),
        ];
        assert_eq!(lines(text), expected);
    }

    #[test]
    fn literals_hide_what_looks_like_a_comment() {
        let text = "\"// no \\\" // no\" r#\"// \" no\"# br\"// no\" '\"' '\\'' 'a \u{e4} // yes";
        assert_eq!(lines(text), [(1, "yes")]);
        assert_eq!(lines("\"two\nlines // no\" // yes"), [(2, "yes")]);
        assert_eq!(lines("for\"// no\" // yes"), [(1, "yes")]);
    }

    #[test]
    fn an_open_end_is_the_end() {
        for text in ["\"// no", "r#\"// no", "'\\", "'", "x"] {
            assert_eq!(lines(text), []);
        }
        assert_eq!(lines("/* open"), [(1, "/* open")]);
    }
}
