-- Group roles of learners and actors. Each login becomes a member of one of them (GRANT sluice_actor TO LOGIN).
DO $$
BEGIN
    IF to_regrole('sluice_learner') IS NULL THEN CREATE ROLE sluice_learner NOLOGIN; END IF;
    IF to_regrole('sluice_actor') IS NULL THEN CREATE ROLE sluice_actor NOLOGIN; END IF;
    -- A superuser needs no membership.
    IF NOT pg_has_role(current_user, 'sluice_learner', 'MEMBER') THEN
        EXECUTE format('GRANT sluice_learner TO %I', current_user);
    END IF;
END $$;
