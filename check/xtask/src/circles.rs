//! Circles of files: files of one crate that import each other, directly or by way of others.
//!
//! An import is a path from `crate`, `super` or `self`, in a `use` or elsewhere in the code. The
//! root of the crate, and code for tests, do not count. A file may also name the modules of its own
//! folder without `self`: the file and its folder are one room.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use proc_macro2::{Delimiter, TokenStream, TokenTree};

use crate::scan::{inline_module, is_punct, word};

/// The path of a module from the root of its crate.
type Module = Vec<String>;

/// The files of one crate, and the paths that each imports.
#[derive(Default)]
pub struct Files(BTreeMap<Module, Vec<Module>>);

impl Files {
    /// Adds the file at `path` from the crate's folder `src`.
    ///
    /// # Errors
    /// The lexer's error.
    pub fn add(&mut self, path: &Path, text: &str) -> Result<(), String> {
        let tokens: TokenStream = text.parse().map_err(|error| format!("{error}"))?;
        let names = path.with_extension("");
        let mut module: Module = names
            .iter()
            .map(|name| name.to_string_lossy().into_owned())
            .collect();
        if module.last().is_some_and(|name| name == "mod") {
            module.pop();
        }
        if matches!(&module[..], [root] if root == "lib" || root == "main") {
            return Ok(());
        }
        let mut imports = Vec::new();
        walk(tokens, &mut module.clone(), &mut imports);
        self.0.insert(module, imports);
        Ok(())
    }

    /// The files that are in circles.
    pub fn in_circles(&self) -> Vec<String> {
        let edges: BTreeMap<&Module, BTreeSet<&Module>> = (self.0.iter())
            .map(|(from, paths)| {
                let found = paths.iter().filter_map(|path| self.file_of(path));
                (from, found.filter(|to| *to != from).collect())
            })
            .collect();
        let is_in_circle = |start: &&Module| {
            let (mut seen, mut open) = (BTreeSet::new(), vec![*start]);
            while let Some(module) = open.pop() {
                for to in &edges[module] {
                    if to == start {
                        return true;
                    }
                    if seen.insert(*to) {
                        open.push(to);
                    }
                }
            }
            false
        };
        let modules = self.0.keys().filter(is_in_circle);
        modules.map(|module| module.join("::")).collect()
    }

    /// The file that has what `path` names.
    fn file_of(&self, path: &[String]) -> Option<&Module> {
        let lengths = (1..=path.len()).rev();
        let mut found = lengths.filter_map(|length| self.0.get_key_value(&path[..length]));
        found.next().map(|(module, _)| module)
    }
}

fn walk(tokens: TokenStream, module: &mut Module, imports: &mut Vec<Module>) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let mut at = 0;
    while let Some(token) = tokens.get(at) {
        let rest = &tokens[at + 1..];
        match token {
            TokenTree::Punct(punct) if punct.as_char() == '#' && is_for_tests(rest.first()) => {
                at += 1 + item(rest);
            }
            TokenTree::Ident(_) if is_path(rest) => {
                if let Some(base) = base(token, module) {
                    tree(&rest[2..], base, imports);
                }
            }
            TokenTree::Group(group) => {
                let name = inline_module(&tokens[..at], group);
                module.extend(name.clone());
                walk(group.stream(), module, imports);
                module.truncate(module.len() - usize::from(name.is_some()));
            }
            _ => {}
        }
        at += 1;
    }
}

/// Whether this is `[cfg(test)]`, also with more conditions.
fn is_for_tests(token: Option<&TokenTree>) -> bool {
    let text = token.map(ToString::to_string).unwrap_or_default();
    let text = text.replace(char::is_whitespace, "");
    text.starts_with("[cfg(test") || text.starts_with("[cfg(all(test")
}

/// The number of tokens to the end of an item.
fn item(tokens: &[TokenTree]) -> usize {
    let is_end = |token: &TokenTree| match token {
        TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
        other => is_punct(Some(other), ';'),
    };
    let end = tokens.iter().position(is_end);
    end.unwrap_or(tokens.len())
}

fn is_path(tokens: &[TokenTree]) -> bool {
    is_punct(tokens.first(), ':') && is_punct(tokens.get(1), ':')
}

/// The module that `crate`, `self` or `super` names in `module`.
fn base(token: &TokenTree, module: &Module) -> Option<Module> {
    match token.to_string().as_str() {
        "crate" => Some(Vec::new()),
        "self" => Some(module.clone()),
        "super" => Some(module[..module.len().saturating_sub(1)].to_vec()),
        _ => None,
    }
}

/// Adds each path that begins with `prefix` and continues with `tokens`.
fn tree(tokens: &[TokenTree], mut prefix: Module, imports: &mut Vec<Module>) {
    match tokens.first() {
        Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Brace => {
            let inside: Vec<TokenTree> = group.stream().into_iter().collect();
            for part in inside.split(|token| is_punct(Some(token), ',')) {
                tree(part, prefix.clone(), imports);
            }
        }
        first => {
            match word(first) {
                Some(name) if name == "super" => _ = prefix.pop(),
                Some(name) if name != "self" => prefix.push(name),
                _ => {}
            }
            match tokens.get(1..).filter(|rest| is_path(rest)) {
                Some(rest) => tree(&rest[2..], prefix, imports),
                None => imports.push(prefix),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn circles(files: &[(&str, &str)]) -> Vec<String> {
        let mut found = Files::default();
        for (path, text) in files {
            found.add(Path::new(path), text).unwrap();
        }
        found.in_circles()
    }

    #[test]
    fn a_circle_is_found_in_every_way_to_write_a_path() {
        for text in [
            "use crate::b::B;",
            "use crate::{a, b::{self, B}};",
            "use super::b::B;",
            "fn f() -> crate::b::B { macro_of!(1) }",
            "vec![crate::b::B]",
            "mod inner { use super::super::b; }",
        ] {
            let found = circles(&[("a.rs", text), ("b.rs", "use crate::a::A;")]);
            assert_eq!(found, ["a", "b"], "{text}");
        }
    }

    #[test]
    fn files_beside_a_circle_are_not_in_it() {
        let found = circles(&[
            ("lib.rs", "use crate::into::X;"),
            ("into.rs", "use crate::a;"),
            ("a.rs", "use crate::b::c::C;"),
            ("b/c.rs", "use crate::d::mod_item;"),
            ("d/mod.rs", "use crate::a; use crate::out::F;"),
            ("out.rs", "use crate::Root;"),
        ]);
        assert_eq!(found, ["a", "b::c", "d"]);
    }

    #[test]
    fn tests_and_the_root_are_left_out() {
        let found = circles(&[
            ("lib.rs", "use crate::a::A;"),
            (
                "a.rs",
                "use crate::Root;\n#[cfg(test)]\nmod tests { use crate::b::B; }",
            ),
            ("b.rs", "use crate::a::A;\n#[cfg(test)]\nuse crate::c::C;"),
            ("c.rs", "use super::b::B;"),
        ]);
        assert!(found.is_empty(), "{found:?}");
    }
}
