// Kept calls: an open addressing table of records. Everything here requires the GIL.
#pragma once
#include "driver.h"
#include "library.h"
#include "result.h"

#include <algorithm>
#include <memory>
#include <variant>

namespace gemmtune {

// The way to run a call; empty for one that only Python can run. The order is that of KINDS in records.py.
using Launch = std::variant<std::monostate, HostFunction, TorchOperation, DriverLaunch, DeviceFunction, LibraryProduct>;

// The actions for calls with this key. Running calls count as users, so a record outlives its removal from the table.
struct Record {
  Key key;
  uint64_t hash = 0;
  int users = 1;
  int64_t lengthy_from = 0;     // smallest M for which releasing the GIL pays
  int64_t lo = 0, hi = 0;       // the Ms that it serves, if there are several
  uint64_t capture_info = 0;    // of a layer: called to detect a graph capture, which Python serves; 0 if no check is needed
  PyObject* entry = nullptr;    // the entry in Python's table
  PyObject* fresh = nullptr;    // new(tensors, scalars)
  PyObject* into = nullptr;     // into(out, tensors, scalars)
  PyObject* choice = nullptr;   // set if the choice has its own format of a prepacked b
  PyObject* owner = nullptr;    // keeps the memory and the code of a launch alive
  int tensors = 0;              // number of tensors that a call reads
  Result result;
  Memory memory;
  Launch launch;
  std::vector<Record*> runs;    // in the order of their Ms, if the key is for every M; the record itself then launches nothing
  std::vector<int64_t> starts;  // the first M of each run
  bool apart = false;           // true if some of its Ms have their own records

  Record() = default;
  Record(Record const&) = delete;
  ~Record() {
    Py_XDECREF(entry);
    Py_XDECREF(fresh);
    Py_XDECREF(into);
    Py_XDECREF(choice);
    Py_XDECREF(owner);
    for (Record* run : runs) leave(run);
  }

  void add(std::unique_ptr<Record> run) {
    starts.push_back(run->lo);
    runs.push_back(run.release());
  }
  static void leave(Record* record) {
    if (--record->users == 0) delete record;
  }
  bool several() const { return hi != 0; }
  bool lengthy(int64_t rows) const { return rows >= lengthy_from; }

  // Return the run that serves that M, or null. The search has no branches: random Ms would mispredict half of them.
  Record* at(int64_t rows) const {
    size_t first = 0;
    for (size_t count = starts.size(), half; count > 1; count -= half) {
      half = count / 2;
      first += starts[first + half] <= rows ? half : 0;
    }
    Record* run = runs.empty() ? nullptr : runs[first];
    return run != nullptr && run->lo <= rows && rows <= run->hi ? run : nullptr;
  }
};

class Table {
 public:
  // Return the record for the call's own M, else the one for every M. The record for every M is read first: all calls of a weight share
  // it, while a record for a random M is in no cache.
  Record* find(Key const& key) const {
    const uint64_t words = key.hash();
    Record* every = families_ && key.rows != kEveryRows ? find(key, kEveryRows, words) : nullptr;
    Record* own = every == nullptr || every->apart ? find(key, key.rows, words) : nullptr;
    return own != nullptr || every == nullptr ? own : every->at(key.rows);
  }

  // Return true if calls like this one are known for every M, whichever Ms its runs serve.
  bool knows_rows_of(Key const& key) const { return find(key, kEveryRows, key.hash()) != nullptr; }

  // Take ownership of the record. It replaces one with the same key.
  void insert(std::unique_ptr<Record> record) {
    record->hash = Key::mixed(record->key.hash(), record->key.rows);
    if ((count_ + 1) * 2 > slots_.size()) grow();
    mark_apart(*record);
    Record*& slot = place(slots_, mask_, *record);
    Record* before = slot;
    slot = record.release();
    if (before == nullptr) ++count_;
    else Record::leave(before);
  }

  void clear() {
    std::vector<Record*> before(kLeastSlots, nullptr);
    before.swap(slots_);
    mask_ = kLeastSlots - 1;
    count_ = 0;
    families_ = false;
    for (Record* record : before) {  // may run Python code, which finds the table empty
      if (record != nullptr) Record::leave(record);
    }
  }

  size_t count() const { return count_; }

 private:
  Record* find(Key const& key, int64_t rows, uint64_t words) const {
    const uint64_t hash = Key::mixed(words, rows);
    for (size_t i = hash & mask_;; i = (i + 1) & mask_) {
      Record* record = slots_[i];
      if (record == nullptr || (record->hash == hash && record->key.is(key, rows))) return record;
    }
  }

  // Mark the record for every M if some of its Ms have records of their own.
  void mark_apart(Record& record) {
    const uint64_t words = record.key.hash();
    if (record.key.rows != kEveryRows) {
      Record* every = families_ ? find(record.key, kEveryRows, words) : nullptr;
      if (every != nullptr) every->apart = true;
    } else if (!record.runs.empty()) {
      families_ = true;
      for (Record const* one : slots_) {
        record.apart |= one != nullptr && one->key.rows != kEveryRows && one->key.is(record.key, one->key.rows);
      }
    }
  }

  static constexpr size_t kLeastSlots = 1024;

  static Record*& place(std::vector<Record*>& slots, size_t mask, Record const& record) {
    for (size_t i = record.hash & mask;; i = (i + 1) & mask) {
      if (slots[i] == nullptr || (slots[i]->hash == record.hash && slots[i]->key.is(record.key, record.key.rows))) return slots[i];
    }
  }

  void grow() {
    std::vector<Record*> more(slots_.size() * 2, nullptr);
    for (Record* record : slots_) {
      if (record != nullptr) place(more, more.size() - 1, *record) = record;
    }
    slots_.swap(more);
    mask_ = slots_.size() - 1;
  }

  std::vector<Record*> slots_ = std::vector<Record*>(kLeastSlots, nullptr);
  size_t mask_ = kLeastSlots - 1;
  size_t count_ = 0;
  bool families_ = false;  // true if there are records for every M
};

}  // namespace gemmtune
