//! JSON for `attach.py`, passed by a callback.

use serde_json::Value;

/// Receives a UTF-8 text and its length in bytes. The text is valid until the callback returns.
pub type JsonCallback = extern "C" fn(*const u8, usize);

/// Passes a value to the callback.
pub fn send(value: &Value, callback: JsonCallback) {
    let text = value.to_string();
    callback(text.as_ptr(), text.len());
}
