//! Changes the structure of a JSON document, which stays valid.

use crate::values;
use fastrand::Rng;
use serde_json::{Map, Value, json};

/// The most bytes that copies of an element add.
const COPIES_BYTES: u64 = 256 << 10;

/// Changes one value of `document`, at any depth.
pub fn mutate(document: &mut Value, rng: &mut Rng) {
    let mut at = document;
    loop {
        let children = match &*at {
            Value::Array(all) => all.len(),
            Value::Object(all) => all.len(),
            _ => 0,
        };
        if children == 0 || rng.u8(..6) == 0 {
            return change(at, rng);
        }
        let child = rng.usize(..children);
        at = match at {
            Value::Array(all) => &mut all[child],
            Value::Object(all) => all.values_mut().nth(child).expect("it has so many"),
            _ => return,
        };
    }
}

fn change(value: &mut Value, rng: &mut Rng) {
    if rng.u8(..12) == 0 {
        *value = anything(rng);
        return;
    }
    match value {
        Value::Number(old) => *value = number(old.as_u64().unwrap_or(0), rng),
        Value::Bool(old) => *old = !*old,
        Value::String(old) => *old = string(old, rng),
        Value::Array(all) => change_array(all, rng),
        Value::Object(all) => change_object(all, rng),
        Value::Null => *value = anything(rng),
    }
}

fn number(old: u64, rng: &mut Rng) -> Value {
    match rng.u8(..8) {
        0 => json!(old.wrapping_add(1)),
        1 => json!(old.wrapping_sub(1)),
        2 => json!(old ^ 1 << rng.u32(..64)),
        3 => json!(-(rng.u16(..) as i64)),
        4 => json!(old as f64 + 0.5),
        5 => json!(1u64 << rng.u32(..64)),
        _ => json!(values::number(rng)),
    }
}

fn string(old: &str, rng: &mut Rng) -> String {
    match rng.u8(..5) {
        0 => String::new(),
        1 => format!("{old}\0"),
        2 => "x".repeat(rng.usize(..70_000)),
        3 => (0..rng.usize(..8)).map(|_| rng.char(..)).collect(),
        _ => old.chars().rev().collect(),
    }
}

fn change_array(all: &mut Vec<Value>, rng: &mut Rng) {
    let len = all.len();
    match (rng.u8(..5), len) {
        (0, 1..) => drop(all.remove(rng.usize(..len))),
        (1, 1..) => all.push(all[rng.usize(..len)].clone()),
        (2, 1..) => {
            let copies = [2, 40, 1000, 20_000][rng.usize(..4)];
            let one = all[rng.usize(..len)].clone();
            // The document stays shorter than a reader takes.
            let copies = copies.min(COPIES_BYTES / one.to_string().len().max(1) as u64);
            all.extend((0..copies).map(|index| numbered(&one, index)));
        }
        (3, _) => all.clear(),
        _ => rng.shuffle(all),
    }
}

/// A copy of an element with other numbers, so that no two copies are equal.
fn numbered(one: &Value, index: u64) -> Value {
    let mut copy = one.clone();
    if let Value::Object(fields) = &mut copy {
        for field in fields.values_mut() {
            if let Some(old) = field.as_u64() {
                *field = json!(old.wrapping_add(index + 1));
            }
        }
    }
    copy
}

fn change_object(all: &mut Map<String, Value>, rng: &mut Rng) {
    let Some(name) = all.keys().nth(rng.usize(..all.len().max(1))).cloned() else {
        all.insert("more".into(), anything(rng));
        return;
    };
    match rng.u8(..5) {
        0 => drop(all.remove(&name)),
        1 => drop(all.insert("more".into(), anything(rng))),
        2 => {
            let value = all.remove(&name).expect("it is there");
            all.insert(format!("{name}_"), value);
        }
        3 => {
            let other = all.values().nth(rng.usize(..all.len())).cloned();
            all.insert(name, other.expect("it has so many"));
        }
        _ => drop(all.insert(name, anything(rng))),
    }
}

/// A value of any kind.
fn anything(rng: &mut Rng) -> Value {
    match rng.u8(..9) {
        0 => Value::Null,
        1 => json!(rng.bool()),
        2 => number(0, rng),
        3 => json!(string("name", rng)),
        4 => json!([]),
        5 => json!({}),
        6 => json!(values::number(rng)),
        7 => json!([values::number(rng), "x"]),
        _ => {
            // Deeper than a parser follows.
            let deep = (0..rng.usize(..300)).fold(json!(1), |inner, _| json!([inner]));
            json!({ "deep": deep })
        }
    }
}
