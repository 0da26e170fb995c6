//! JSON whose last line is the checksum of all before it, so that each changed byte is found.

use super::Checksum;

/// Closes a JSON object whose members are in `body`, which begins with `{` and ends with a comma and the
/// end of a line.
pub fn seal(mut body: String) -> Vec<u8> {
    let end = end(body.as_bytes());
    body.push_str(&end);
    body.into_bytes()
}

/// Checks that nothing has changed since [`seal`].
///
/// # Errors
///
/// What is wrong.
pub fn check(bytes: &[u8]) -> Result<(), String> {
    let len = end(b"").len();
    let at = bytes.len().checked_sub(len);
    let Some((body, found)) = at.map(|at| bytes.split_at(at)) else {
        return Err(format!("it has {} bytes, and no end", bytes.len()));
    };
    if !found.starts_with(br#""checksum": ""#) {
        return Err("it does not end with its checksum: it is cut off, or something else".into());
    }
    match found == end(body).as_bytes() {
        true => Ok(()),
        false => Err("its checksum does not fit: it has changed since it was written".into()),
    }
}

fn end(body: &[u8]) -> String {
    format!("\"checksum\": \"{}\"\n}}\n", Checksum::of(body))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_changed_bit_and_each_cut_is_found() {
        let sealed = seal("{\n\"step\": 3,\n".into());
        check(&sealed).unwrap();
        let value: serde_json::Value = serde_json::from_slice(&sealed).unwrap();
        assert_eq!(value["step"], 3);
        for at in 0..sealed.len() {
            for bit in 0..8 {
                let mut changed = sealed.clone();
                changed[at] ^= 1 << bit;
                check(&changed).unwrap_err();
            }
            check(&sealed[..at]).unwrap_err();
        }
    }
}
