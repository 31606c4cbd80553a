//! The attribute `lacuna_skip::test`. Import it from `lacuna-skip`, which has the other half.
#![forbid(unsafe_code)]

use proc_macro::{Delimiter, Group, Ident, Punct, Spacing, Span, TokenStream, TokenTree};

/// A test whose called functions may end it as skipped: see `lacuna_skip::skip_test`.
///
/// It replaces the standard library's attribute, for functions without parameters and result. `use
/// lacuna_skip::test;` does so for a whole file.
#[proc_macro_attribute]
pub fn test(_: TokenStream, function: TokenStream) -> TokenStream {
    let mut tokens: Vec<TokenTree> = function.into_iter().collect();
    let body = tokens.pop().map(TokenStream::from).unwrap_or_default();
    let closure = [bar(), bar(), group(Delimiter::Brace, body)];
    let mut call = path(&["lacuna_skip", "run"]);
    call.push(group(Delimiter::Parenthesis, closure.into_iter().collect()));
    let attribute = path(&["core", "prelude", "v1", "test"]);
    let mut whole = vec![
        TokenTree::Punct(Punct::new('#', Spacing::Alone)),
        group(Delimiter::Bracket, attribute.into_iter().collect()),
    ];
    whole.append(&mut tokens);
    whole.push(group(Delimiter::Brace, call.into_iter().collect()));
    whole.into_iter().collect()
}

/// `::a::b`.
fn path(names: &[&str]) -> Vec<TokenTree> {
    let colon = |spacing| TokenTree::Punct(Punct::new(':', spacing));
    let part = |name: &&str| {
        let name = Ident::new(name, Span::call_site());
        [
            colon(Spacing::Joint),
            colon(Spacing::Alone),
            TokenTree::Ident(name),
        ]
    };
    names.iter().flat_map(part).collect()
}

fn bar() -> TokenTree {
    TokenTree::Punct(Punct::new('|', Spacing::Alone))
}

fn group(delimiter: Delimiter, content: TokenStream) -> TokenTree {
    TokenTree::Group(Group::new(delimiter, content))
}
