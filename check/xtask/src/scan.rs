//! Reads a Rust file as tokens, and collects the data for the rules.
//!
//! There is no parser, because tokens are enough. The lexer leaves out comments, knows strings and
//! lines, and matches brackets. The bodies of macros (`proptest!`) look like other code.

use std::collections::BTreeSet;

use proc_macro2::{Delimiter, Group, Spacing, TokenStream, TokenTree};

/// The result of a file's scan.
#[derive(Default, Debug)]
pub struct Scan {
    /// Inner attributes of the crate or module, without spaces: `forbid(unsafe_code)`.
    pub inner_attributes: Vec<String>,
    /// Outer attributes, in the same form.
    pub attributes: Vec<Attribute>,
    /// Functions with a body.
    pub functions: Vec<Function>,
    /// Lines with an `unsafe` block, `impl` or attribute.
    pub unsafe_lines: Vec<usize>,
    /// `name!` calls.
    pub macros: Vec<Attribute>,
    /// `mod name;` declarations.
    pub modules: Vec<Module>,
    /// Every identifier of the code, and every word of its string literals.
    pub names: BTreeSet<String>,
}

/// An attribute or a macro name, and its line.
#[derive(PartialEq, Eq, Debug)]
pub struct Attribute {
    /// Its text without spaces.
    pub text: String,
    /// Where it starts.
    pub line: usize,
}

/// A function with a body.
#[derive(PartialEq, Eq, Debug)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// Line of its `fn`.
    pub line: usize,
    /// The number of lines from its `fn` to its closing brace.
    pub lines: usize,
}

/// A module with its own file.
#[derive(PartialEq, Eq, Debug)]
pub struct Module {
    /// Inline modules around it, outermost first, and its own name.
    pub path: Vec<String>,
    /// The value of its `#[path]` attribute.
    pub file: Option<String>,
}

/// Scans the text of a file.
///
/// # Errors
/// The lexer's error. Such a file would not compile either.
pub fn scan(text: &str) -> Result<Scan, String> {
    let tokens: TokenStream = text.parse().map_err(|error| format!("{error}"))?;
    let mut scan = Scan::default();
    walk(tokens, &mut Vec::new(), &mut scan);
    Ok(scan)
}

fn walk(tokens: TokenStream, inside: &mut Vec<String>, scan: &mut Scan) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    if word(tokens.first()).is_some_and(|word| word == "doc") && is_punct(tokens.get(1), '=') {
        return; // a doc comment
    }
    for at in 0..tokens.len() {
        let rest = &tokens[at..];
        match &tokens[at] {
            TokenTree::Punct(punct) if punct.as_char() == '#' => attribute(rest, scan),
            TokenTree::Ident(ident) => {
                let name = ident.to_string();
                match name.as_str() {
                    "fn" => function(rest, scan),
                    "unsafe" => unsafe_code(rest, scan),
                    "mod" => module(&tokens, at, inside, scan),
                    _ => call(rest, scan),
                }
                scan.names.insert(name);
            }
            TokenTree::Group(group) => {
                let name = inline_module(&tokens[..at], group);
                inside.extend(name.clone());
                walk(group.stream(), inside, scan);
                inside.truncate(inside.len() - usize::from(name.is_some()));
            }
            TokenTree::Literal(literal) => scan.names.extend(words(&literal.to_string())),
            _ => {}
        }
    }
}

fn line(token: &TokenTree) -> usize {
    token.span().start().line
}

/// Whether a token is this punctuation.
pub fn is_punct(token: Option<&TokenTree>, char: char) -> bool {
    matches!(token, Some(TokenTree::Punct(punct)) if punct.as_char() == char)
}

/// The identifier that a token is.
pub fn word(token: Option<&TokenTree>) -> Option<String> {
    match token? {
        TokenTree::Ident(ident) => Some(ident.to_string()),
        _ => None,
    }
}

/// The words of a text that may be identifiers.
pub fn words(text: &str) -> impl Iterator<Item = String> {
    let words = text.split(|c: char| !c.is_alphanumeric() && c != '_');
    words.filter(|word| !word.is_empty()).map(str::to_owned)
}

/// The text inside of `[...]` without spaces.
fn bracketed(token: Option<&TokenTree>) -> Option<String> {
    match token? {
        TokenTree::Group(group) if group.delimiter() == Delimiter::Bracket => {
            Some(group.stream().to_string().replace(char::is_whitespace, ""))
        }
        _ => None,
    }
}

fn attribute(tokens: &[TokenTree], scan: &mut Scan) {
    if let Some(text) = bracketed(tokens.get(1)) {
        scan.attributes.push(Attribute {
            text,
            line: line(&tokens[0]),
        });
    } else if is_punct(tokens.get(1), '!') {
        scan.inner_attributes.extend(bracketed(tokens.get(2)));
    }
}

fn function(tokens: &[TokenTree], scan: &mut Scan) {
    let Some(name) = word(tokens.get(1)) else {
        return; // a function pointer type
    };
    let body = tokens.iter().find_map(|token| match token {
        TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => Some(Some(group)),
        TokenTree::Punct(punct) if punct.as_char() == ';' => Some(None),
        _ => None,
    });
    if let Some(Some(body)) = body {
        let line = line(&tokens[0]);
        let last = body.span_close().end().line;
        scan.functions.push(Function {
            name,
            line,
            lines: last - line + 1,
        });
    }
}

/// Finds `unsafe` blocks, `unsafe impl` and `#[unsafe(...)]`. Declarations (`unsafe fn`) are left
/// out: their documentation has the contract.
fn unsafe_code(tokens: &[TokenTree], scan: &mut Scan) {
    let claims = match tokens.get(1) {
        Some(TokenTree::Group(group)) => group.delimiter() != Delimiter::Bracket,
        next => word(next).is_some_and(|word| word == "impl"),
    };
    if claims {
        scan.unsafe_lines.push(line(&tokens[0]));
    }
}

fn call(tokens: &[TokenTree], scan: &mut Scan) {
    let Some(TokenTree::Punct(bang)) = tokens.get(1) else {
        return;
    };
    let called = bang.as_char() == '!' && bang.spacing() == Spacing::Alone;
    if called && matches!(tokens.get(2), Some(TokenTree::Group(_))) {
        scan.macros.push(Attribute {
            text: tokens[0].to_string(),
            line: line(&tokens[0]),
        });
    }
}

fn module(tokens: &[TokenTree], at: usize, inside: &[String], scan: &mut Scan) {
    let Some(name) = word(tokens.get(at + 1)) else {
        return;
    };
    if is_punct(tokens.get(at + 2), ';') {
        let mut path = inside.to_vec();
        path.push(name);
        scan.modules.push(Module {
            path,
            file: path_attribute(&tokens[..at]),
        });
    }
}

/// The `#[path = "..."]` right before a declaration, behind at most a `pub(..)`.
fn path_attribute(before: &[TokenTree]) -> Option<String> {
    let near = before
        .iter()
        .rev()
        .take_while(|token| !is_punct(Some(token), ';'));
    let text = near
        .filter_map(|token| bracketed(Some(token)))
        .find(|t| t.starts_with("path="))?;
    Some(text.strip_prefix("path=")?.trim_matches('"').to_owned())
}

/// If `group` is the body of a module: the name of the module.
pub fn inline_module(before: &[TokenTree], group: &Group) -> Option<String> {
    let [.., keyword, name] = before else {
        return None;
    };
    let is_module = group.delimiter() == Delimiter::Brace && keyword.to_string() == "mod";
    if is_module { word(Some(name)) } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_measured_wherever_they_are() {
        let text = "fn a() {}\ntrait T { fn none(); fn b(x: fn(u8) -> u8)\n{\n} }\n\
                    proptest! {\n #[test]\n fn c(x in 0..3) {\n }\n}\nconst fn d() -> u8 { 1 }";
        let found = scan(text).unwrap().functions;
        let found: Vec<_> = found
            .iter()
            .map(|f| (f.name.as_str(), f.line, f.lines))
            .collect();
        assert_eq!(found, [("a", 1, 1), ("b", 2, 3), ("c", 7, 2), ("d", 10, 1)]);
    }

    #[test]
    fn unsafe_is_seen_and_its_declarations_are_not() {
        let text = "unsafe fn f() {}\nunsafe impl Send for X {}\nfn g() {\n unsafe { f() }\n}\n\
                    // unsafe { }\nconst S: &str = \"unsafe { }\";\n#[unsafe(no_mangle)] fn h() {}";
        assert_eq!(scan(text).unwrap().unsafe_lines, [2, 4, 8]);
    }

    #[test]
    fn attributes_macros_and_modules() {
        let text = "#![forbid( unsafe_code )]\nmod a;\nmod b { pub mod c; }\n\
                    #[path = \"x/y.rs\"] pub(crate) mod d;\n#[cfg(test)] fn t() { a != (b); c!() }";
        let scan = scan(text).unwrap();
        assert_eq!(scan.inner_attributes, ["forbid(unsafe_code)"]);
        let modules: Vec<_> = scan
            .modules
            .iter()
            .map(|m| (m.path.join("/"), &m.file))
            .collect();
        let file = Some("x/y.rs".to_owned());
        let expected = [("a", &None), ("b/c", &None), ("d", &file)];
        assert_eq!(
            modules,
            expected.map(|(path, file)| (path.to_owned(), file))
        );
        assert_eq!(
            scan.macros,
            [Attribute {
                text: "c".into(),
                line: 5
            }]
        );
        assert!(
            scan.attributes
                .iter()
                .any(|a| a.text == "cfg(test)" && a.line == 5)
        );
    }

    #[test]
    fn names_are_identifiers_and_words_of_strings_but_not_of_comments() {
        let text = "/// of_doc\nfn of_code() { f(\"a.of_string\") } // of_comment\n//! of_module";
        let names = scan(text).unwrap().names;
        let has = |name: &str| names.contains(name);
        assert!(has("of_code") && has("of_string"));
        assert!(!has("of_doc") && !has("of_comment") && !has("of_module"));
    }

    #[test]
    fn what_does_not_lex_is_an_error() {
        assert!(scan("fn a( {").is_err());
    }
}
